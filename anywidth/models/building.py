"""What the networks of the zoo are built from."""

from __future__ import annotations

import math

from torch import nn

from anywidth.errors import AnywidthError


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


def initialize(model: nn.Module) -> None:
    """The initialisation the paper's networks were trained from."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
            nn.init.normal_(module.weight, 0.0, math.sqrt(2.0 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def check_total_stride(total_stride: int, known: tuple[int, ...]) -> None:
    if total_stride not in known:
        raise AnywidthError(f"total_stride={total_stride!r}: expected one of {known}")
