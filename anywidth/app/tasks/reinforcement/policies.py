"""The network that plays an environment, converted to run at any width."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from anywidth.app.tasks.reinforcement.environments import make_environment
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings
from anywidth.app.tasks.starting_network import built_alone
from anywidth.errors import AnywidthError
from anywidth.models.atari_cnn import ActorCritic, atari_cnn, minatar_cnn, mlp_policy
from anywidth.slimming.convert import slimmable

LEAST_PIXELS = 36
"""Smaller images are boards, whose cells are objects, not pixels."""


def build_model(settings: ReinforcementSettings, actions: int, shape: tuple[int, ...]) -> nn.Module:
    """The converted network of a run, with its initial weights; `shape` is of one observation."""
    torch.manual_seed(settings.seed)
    model: nn.Module = network_for(actions, shape)
    example = torch.rand(2, *shape)
    # Built for its width, because a slice of orthogonal weights is not orthogonal.
    model, widths = built_alone(model, example, settings, ActorCritic.initialize)
    slimmable(model, None, widths, example_input=example)
    if len(shape) == 3 and shape[1] >= LEAST_PIXELS:
        # Halves the time of a step on a CPU, except on small boards.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def actions_and_shape(environment: str) -> tuple[int, tuple[int, ...]]:
    """The number of actions of an environment, and the shape of one observation."""
    probe = make_environment(environment, 1, seed=0)
    with contextlib.closing(probe):
        return probe.actions, probe.observation_shape


def network_for(actions: int, shape: tuple[int, ...]) -> ActorCritic:
    """The paper's network for images, a small one for boards, two layers for a few numbers."""
    if len(shape) == 1:
        return mlp_policy(actions, shape[0])
    if len(shape) != 3 or shape[1] != shape[2]:
        raise AnywidthError(
            f"observations of shape {shape}: expected (numbers,) or (channels, side, side)"
        )
    if shape[1] >= LEAST_PIXELS:
        return atari_cnn(actions, shape[0], shape[1])
    return minatar_cnn(actions, shape[0], shape[1])
