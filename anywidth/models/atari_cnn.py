"""The paper's network for Atari, and smaller ones for small games: policy and value in one."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.models.building import check_counts
from anywidth.width import check_whole


class ActorCritic(nn.Module):
    """Layers that a policy head and a value head share; returns (logits, value).

    Observations of (N, ...) give logits of (N, actions) and values of (N,). Observations in uint8
    are pixels and are scaled to [0, 1]; others are used as they are.
    """

    def __init__(self, features: nn.Sequential, hidden: nn.Linear, actions: int) -> None:
        super().__init__()
        self.features = features
        self.hidden = hidden
        self.activation = nn.ReLU(inplace=True)
        self.policy = nn.Linear(hidden.out_features, actions)
        self.value = nn.Linear(hidden.out_features, 1)
        self.initialize()

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        if observations.dtype == torch.uint8:
            observations = observations.to(self.policy.weight.dtype) / 255
        features = self.features(observations).flatten(1)
        hidden = self.activation(self.hidden(features))
        return self.policy(hidden), self.value(hidden).squeeze(1)

    def initialize(self) -> None:
        """Orthogonal weights. A nearly uniform policy explores, as in PPO's own implementation."""
        gains: dict[nn.Module, float] = {self.policy: 0.01, self.value: 1.0}
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(module.weight, gains.get(module, math.sqrt(2)))
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]


def atari_cnn(actions: int = 4, in_channels: int = 4, image_size: int = 84) -> ActorCritic:
    """The paper's network: convolutions of 32, 64 and 32 channels, then 512 units.

    7.6 M multiply-adds for 4 frames of 84x84 pixels.

    Args:
        actions: outputs of the policy; Breakout has 4.
        in_channels: frames in an observation.
        image_size: height and width of the frames.
    """
    check_counts(actions=actions, in_channels=in_channels)
    side = image_size
    for kernel, stride in ((8, 4), (4, 2), (3, 1)):
        side = (side - kernel) // stride + 1
    if side < 1:
        raise AnywidthError(
            f"image_size={image_size!r}: the convolutions need at least 36 pixels; for boards of "
            "10x10 use minatar_cnn"
        )
    features = nn.Sequential(
        nn.Conv2d(in_channels, 32, 8, stride=4),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 32, 3),
        nn.ReLU(inplace=True),
    )
    return ActorCritic(features, nn.Linear(32 * side * side, 512), actions)


def minatar_cnn(
    actions: int = 3, in_channels: int = 4, board_size: int = 10, channels: int = 32
) -> ActorCritic:
    """A network for MinAtar: one 3x3 convolution and 128 units, 0.3 M multiply-adds.

    Args:
        actions: outputs of the policy.
        in_channels: channels of an observation; each game has its own number.
        board_size: height and width of the board.
        channels: outputs of the convolution. MinAtar's authors use 16, which leaves few widths.
    """
    check_counts(actions=actions, in_channels=in_channels, channels=channels)
    check_whole(board_size, 3, "board_size")
    features = nn.Sequential(nn.Conv2d(in_channels, channels, 3), nn.ReLU(inplace=True))
    return ActorCritic(features, nn.Linear(channels * (board_size - 2) ** 2, 128), actions)


def mlp_policy(actions: int = 2, in_features: int = 4, units: int = 64) -> ActorCritic:
    """A network for a few numbers per observation, such as CartPole's: two layers of `units`."""
    check_counts(actions=actions, in_features=in_features, units=units)
    features = nn.Sequential(nn.Linear(in_features, units), nn.ReLU(inplace=True))
    return ActorCritic(features, nn.Linear(units, units), actions)
