"""Bicubic resizing as in MATLAB's `imresize`, the convention of published x2 results.

PyTorch's antialiased bicubic has MATLAB's kernel (a = -0.5, wider when shrinking), but ignores the
part of the kernel outside the image, where MATLAB mirrors it. Therefore the image is first extended
by a mirrored margin, which is cut off after resizing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL_RADIUS = 2  # of the cubic kernel, in pixels of the smaller image


def downscale(images: Tensor, factor: int) -> Tensor:
    """Shrink (N, C, H, W) images `factor` times; H and W must be multiples (`crop_to_multiple`).

    uint8 images are rounded to uint8 once, after both directions. Floating-point images keep their
    range, but may overshoot slightly beside edges, because the kernel has negative lobes.
    """
    height, width = images.shape[-2:]
    size = (height // factor, width // factor)
    return _resize(images, size, margin=KERNEL_RADIUS * factor, cut=KERNEL_RADIUS)


def upscale(images: Tensor, factor: int) -> Tensor:
    """Enlarge (N, C, H, W) images `factor` times: the baseline of super-resolution.

    uint8 images are rounded to uint8; floating-point images are as in `downscale`.
    """
    height, width = images.shape[-2:]
    size = (height * factor, width * factor)
    return _resize(images, size, margin=KERNEL_RADIUS, cut=KERNEL_RADIUS * factor)


def crop_to_multiple(images: Tensor, factor: int) -> Tensor:
    """Cut rows at the bottom and columns at the right until both counts divide by `factor`."""
    height, width = images.shape[-2:]
    return images[..., : height - height % factor, : width - width % factor]


def round_to_uint8(images: Tensor) -> Tensor:
    """8-bit pixels of floating-point images in [0, 1], as in a picture file."""
    return _round(images * 255)


def _resize(images: Tensor, size: tuple[int, int], margin: int, cut: int) -> Tensor:
    """Mirror `margin` pixels around the images, resize, and cut `cut` pixels on each side."""
    padded = _mirror(_mirror(images, margin, -2), margin, -1)
    if images.dtype == torch.uint8:
        padded = padded.float()
    height, width = size
    resized = F.interpolate(
        padded, size=(height + 2 * cut, width + 2 * cut), mode="bicubic", antialias=True
    )[..., cut : cut + height, cut : cut + width]
    return _round(resized) if images.dtype == torch.uint8 else resized


def _mirror(images: Tensor, margin: int, dim: int) -> Tensor:
    """Extend the images beyond their border by mirroring, with the edge pixel repeated."""
    length = images.shape[dim]
    position = torch.arange(-margin, length + margin, device=images.device) % (2 * length)
    return images.index_select(
        dim, torch.where(position < length, position, 2 * length - 1 - position)
    )


def _round(levels: Tensor) -> Tensor:
    """Nearest 8-bit level, halves up as in MATLAB (`Tensor.round` rounds halves to even)."""
    return (levels + 0.5).floor().clamp(0, 255).to(torch.uint8)
