"""WDSR-A, the paper's super-resolution network: wide activations, weight norm, no batch norm."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from anywidth.errors import AnywidthError
from anywidth.models.building import check_counts

SCALES = (2, 3, 4)
DIV2K_MEAN = (0.4488, 0.4371, 0.4040)
"""Mean red, green and blue of DIV2K's training images."""


def _convolution(in_channels: int, out_channels: int, kernel_size: int) -> nn.Conv2d:
    """A weight-normalised convolution that keeps height and width."""
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2)
    weight_norm(convolution)
    return convolution


class WideBlock(nn.Module):
    """A residual block whose activation has `expansion` times the channels of its input."""

    def __init__(self, channels: int, expansion: int) -> None:
        super().__init__()
        self.widen = _convolution(channels, channels * expansion, 3)
        self.activation = nn.ReLU(inplace=True)
        self.narrow = _convolution(channels * expansion, channels, 3)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.narrow(self.activation(self.widen(features)))


class WDSR(nn.Module):
    """Upscales images in [0, 1] of shape (N, in_channels, H, W); build one with `wdsr`."""

    mean: Tensor

    def __init__(
        self,
        channels: int,
        blocks: int,
        scale: int,
        expansion: int,
        in_channels: int,
        mean: Sequence[float],
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).reshape(1, in_channels, 1, 1))
        subpixels = in_channels * scale**2
        self.head = _convolution(in_channels, channels, 3)
        self.body = nn.Sequential(*(WideBlock(channels, expansion) for _ in range(blocks)))
        self.tail = _convolution(channels, subpixels, 3)
        self.skip = _convolution(in_channels, subpixels, 5)
        self.shuffle = nn.PixelShuffle(scale)

    @property
    def scale(self) -> int:
        return self.shuffle.upscale_factor

    @property
    def receptive_radius(self) -> int:
        """Input pixels on each side that affect an output pixel: the overlap that tiles need."""
        return 2 * len(self.body) + 2

    def forward(self, images: Tensor) -> Tensor:
        # Centred and scaled to about [-1, 1], which suits the default initialisation.
        centred = (images - self.mean) * 2
        detail = self.shuffle(self.tail(self.body(self.head(centred))))
        return (detail + self.shuffle(self.skip(centred))) / 2 + self.mean


def wdsr(
    channels: int = 64,
    blocks: int = 8,
    scale: int = 2,
    expansion: int = 4,
    in_channels: int = 3,
    mean: Sequence[float] | None = None,
) -> WDSR:
    """Build WDSR-A for one scale: images in [0, 1] become `scale` times as high and as wide.

    Args:
        channels: channels between blocks; the paper's width n, 32 to 64.
        blocks: residual blocks; the paper's network has 8.
        scale: 2, 3 or 4.
        expansion: channels inside a block, relative to `channels`; 4 in WDSR-A.
        in_channels: channels of the image.
        mean: subtracted from each channel; by default DIV2K's mean for RGB, else 0.5.

    Example:
        `wdsr(channels=32)(torch.rand(1, 3, 48, 48))` has shape (1, 3, 96, 96).
    """
    if scale not in SCALES:
        raise AnywidthError(f"scale={scale!r}: WDSR upscales by 2, 3 or 4. Pass scale=2, 3 or 4.")
    if channels == 1:
        raise AnywidthError(
            "channels=1: WDSR needs at least 2 channels between blocks, even if it is trained at "
            "one width. Pass e.g. channels=16."
        )
    check_counts(channels=channels, expansion=expansion, in_channels=in_channels, blocks=blocks)
    if mean is None:
        mean = DIV2K_MEAN if in_channels == 3 else (0.5,) * in_channels
    if len(mean) != in_channels:
        raise AnywidthError(
            f"mean={mean!r} has {len(mean)} values for in_channels={in_channels}: "
            "pass one value per channel, or leave it out."
        )
    return WDSR(channels, blocks, scale, expansion, in_channels, mean)
