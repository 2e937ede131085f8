"""MobileNet v1: depthwise separable convolutions, no residuals."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from anywidth.models.building import ImageClassifier, conv_norm, multiplied, strides_of

# (output channels, blocks) of the five stages after the stem.
STAGES = ((64, 1), (128, 2), (256, 2), (512, 6), (1024, 2))


class MobileNetV1(ImageClassifier):
    """Build one with `mobilenet_v1`."""


def mobilenet_v1(
    num_classes: int = 1000,
    in_channels: int = 3,
    total_stride: int = 32,
    strides: Sequence[int] | None = None,
    multiplier: float = 1.0,
) -> MobileNetV1:
    """MobileNet v1 as published: 569 M multiply-adds at 224 px.

    Args:
        num_classes: outputs of the classifier.
        in_channels: 3 for colour, 1 for grey images.
        total_stride: input size divided by feature size: 32 for images of about 224 px; 16 or 8
            (the first strides become 1) for small images, such as 8 for CIFAR's 32 px.
        strides: instead, the strides of the stem and of the stages with 128, 256, 512 and 1024
            channels, 1 or 2 each.
        multiplier: share of the published channels that the network has at width 1.0.
    """
    stem, *later = strides_of(total_stride, strides)
    channels = multiplied(32, multiplier)
    layers: list[nn.Module] = [conv_norm(in_channels, channels, 3, stem)]
    for (published, blocks), stride in zip(STAGES, (1, *later), strict=True):
        out = multiplied(published, multiplier)
        for block in range(blocks):
            depthwise = conv_norm(channels, channels, 3, 1 if block else stride, groups=channels)
            layers.append(nn.Sequential(depthwise, conv_norm(channels, out, 1)))
            channels = out
    return MobileNetV1(layers, channels, num_classes)
