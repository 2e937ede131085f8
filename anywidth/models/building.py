"""Building blocks of the networks in the zoo."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.width import check_whole, round_channels


def conv_norm(
    in_channels: int,
    out_channels: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """Convolution, batch norm, activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(
            in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False
        ),
        nn.BatchNorm2d(out_channels),
    ]
    if activation is not None:
        layers.append(activation(inplace=True))
    return nn.Sequential(*layers)


class ImageClassifier(nn.Module):
    """Layers of convolutions, the mean of their outputs over the image, and a linear layer."""

    def __init__(self, layers: Sequence[nn.Module], channels: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


def initialize(model: nn.Module) -> None:
    """Initialise as the paper's networks were."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
            nn.init.normal_(module.weight, 0.0, math.sqrt(2.0 / fan_out))
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def check_counts(**counts: int) -> None:
    """Refuse sizes of a network that are not whole numbers above 0."""
    for name, count in counts.items():
        check_whole(count, 1, name)


def multiplied(channels: int, multiplier: float) -> int:
    """Published channels times a width multiplier, in multiples of 8 as in the MobileNet papers."""
    if not 0 < multiplier <= 1:
        raise AnywidthError(f"multiplier={multiplier!r}: expected above 0, at most 1")
    return channels if multiplier == 1 else round_channels(channels * multiplier, 8)


def strides_of(total_stride: int, strides: Sequence[int] | None) -> tuple[int, ...]:
    """The strides of the five layers that halve the image in the published network.

    With a `total_stride` of 16 or 8 instead of 32, the first strides become 1.
    """
    known = {32: (2, 2, 2, 2, 2), 16: (2, 1, 2, 2, 2), 8: (1, 1, 2, 2, 2)}
    if strides is None:
        if total_stride not in known:
            raise AnywidthError(f"total_stride={total_stride!r}: expected one of {tuple(known)}")
        return known[total_stride]
    if len(strides) != 5 or not set(strides) <= {1, 2}:
        raise AnywidthError(
            f"strides={tuple(strides)!r}: expected five numbers, each 1 or 2, such as {known[8]}"
        )
    return tuple(strides)
