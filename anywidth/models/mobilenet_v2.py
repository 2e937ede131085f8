"""MobileNet v2: inverted residuals with linear bottlenecks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from anywidth.models.building import ImageClassifier, conv_norm, multiplied, strides_of

if TYPE_CHECKING:
    from anywidth.planning.groups import Plan

# (expansion, output channels, blocks, published stride) of each stage after the stem.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    def __init__(self, channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(conv_norm(channels, hidden, 1, activation=nn.ReLU6))
        layers.append(conv_norm(hidden, hidden, 3, stride, groups=hidden, activation=nn.ReLU6))
        layers.append(conv_norm(hidden, out_channels, 1, activation=None))
        self.layers = nn.Sequential(*layers)
        self.expansion = expansion
        self.has_residual = stride == 1 and channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if self.has_residual else y


class MobileNetV2(ImageClassifier):
    """Build one with `mobilenet_v2`."""

    def width_hints(self, plan: Plan) -> None:
        """Scale as the paper does: expand rounded block widths, and keep the last layer whole."""
        for index, block in enumerate(self.features):
            if isinstance(block, InvertedResidual) and block.expansion != 1:
                name = f"features.{index}.layers.0.0"
                expanded, narrow = plan.group_of(name), plan.group_read_by(name)
                plan.tie(expanded.name, narrow.name, block.expansion)
        last = plan.group_of(f"features.{len(self.features) - 1}.0")
        plan.pin(last.name, "the last layer keeps its 1280 channels at widths up to 1.0")


def mobilenet_v2(
    num_classes: int = 1000,
    in_channels: int = 3,
    total_stride: int = 32,
    strides: Sequence[int] | None = None,
    multiplier: float = 1.0,
) -> MobileNetV2:
    """MobileNet v2 as published: 301 M multiply-adds at 224 px.

    Args:
        num_classes: outputs of the classifier.
        in_channels: 3 for colour, 1 for grey images.
        total_stride: input size divided by feature size: 32 for images of about 224 px; 16 or 8
            (the first strides become 1) for small images, such as 8 for CIFAR's 32 px.
        strides: instead, the strides of the stem and of the stages with 24, 32, 64 and 160
            channels, 1 or 2 each.
        multiplier: share of the published channels that the network has at width 1.0; the last
            layer keeps its 1280 channels.
    """
    stem, *later = strides_of(total_stride, strides)
    channels = multiplied(32, multiplier)
    layers: list[nn.Module] = [conv_norm(in_channels, channels, 3, stem, activation=nn.ReLU6)]
    for expansion, published, blocks, halves in STAGES:
        out = multiplied(published, multiplier)
        stride = later.pop(0) if halves == 2 else 1
        for block in range(blocks):
            layers.append(InvertedResidual(channels, out, 1 if block else stride, expansion))
            channels = out
    layers.append(conv_norm(channels, 1280, 1, activation=nn.ReLU6))
    return MobileNetV2(layers, 1280, num_classes)
