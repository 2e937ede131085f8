"""Bicubic resizing as MATLAB's `imresize` does it, the convention of every published x2 figure.

PyTorch's antialiased bicubic has MATLAB's kernel (a = -0.5, widened when it shrinks) but drops the
part of the kernel that hangs over the border, where MATLAB mirrors the image. So the image is
mirrored first, and what the margin became is cut off again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from anywidth.errors import AnywidthError

KERNEL_RADIUS = 2  # of the cubic kernel, in pixels of the smaller of the two images


def downscale(images: Tensor, factor: int) -> Tensor:
    """Shrink (N, C, H, W) images `factor` times; H and W must be multiples (`crop_to_multiple`).

    uint8 images come back rounded to uint8 (once, after both directions); floating-point ones keep
    their range, and may overshoot it a little beside edges as the kernel has negative lobes.
    """
    _check(images, factor)
    height, width = images.shape[-2:]
    if height % factor or width % factor:
        raise AnywidthError(
            f"downscale: {height}x{width} is no multiple of factor={factor} in both directions. "
            f"Cut it first: crop_to_multiple(images, {factor})."
        )
    size = (height // factor, width // factor)
    return _resize(images, size, margin=KERNEL_RADIUS * factor, cut=KERNEL_RADIUS)


def upscale(images: Tensor, factor: int) -> Tensor:
    """Enlarge (N, C, H, W) images `factor` times: the baseline every super-resolution result beats.

    uint8 images come back rounded to uint8, floating-point ones as in `downscale`.
    """
    _check(images, factor)
    height, width = images.shape[-2:]
    size = (height * factor, width * factor)
    return _resize(images, size, margin=KERNEL_RADIUS, cut=KERNEL_RADIUS * factor)


def crop_to_multiple(images: Tensor, factor: int) -> Tensor:
    """Cut rows at the bottom and columns at the right until both counts divide by `factor`."""
    height, width = images.shape[-2:]
    return images[..., : height - height % factor, : width - width % factor]


def round_to_uint8(images: Tensor) -> Tensor:
    """8-bit pixels of floating-point images in [0, 1]: what a picture file would hold."""
    return _round(images * 255)


def _check(images: Tensor, factor: int) -> None:
    if images.ndim != 4 or min(images.shape) < 1:
        raise AnywidthError(
            f"resize: got a tensor of shape {tuple(images.shape)}, expected (N, C, H, W) with at "
            "least one pixel. A single image becomes a batch with image[None]."
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise AnywidthError(
            f"resize: got {images.dtype} images, expected uint8 or floating point. "
            "Convert them with .float()."
        )
    if not isinstance(factor, int) or factor < 1:
        raise AnywidthError(
            f"resize: factor={factor!r}, expected a whole number of at least 1, such as 2."
        )


def _resize(images: Tensor, size: tuple[int, int], margin: int, cut: int) -> Tensor:
    """Mirror `margin` pixels around the images, resize, and cut the `cut` pixels that makes."""
    padded = _mirror(_mirror(images, margin, -2), margin, -1)
    if images.dtype == torch.uint8:
        padded = padded.float()
    height, width = size
    resized = F.interpolate(
        padded, size=(height + 2 * cut, width + 2 * cut), mode="bicubic", antialias=True
    )[..., cut : cut + height, cut : cut + width]
    return _round(resized) if images.dtype == torch.uint8 else resized


def _mirror(images: Tensor, margin: int, dim: int) -> Tensor:
    """Continue the images past their border, edge pixel repeated, however small they are."""
    length = images.shape[dim]
    position = torch.arange(-margin, length + margin, device=images.device) % (2 * length)
    return images.index_select(
        dim, torch.where(position < length, position, 2 * length - 1 - position)
    )


def _round(levels: Tensor) -> Tensor:
    """Nearest 8-bit level, halves upwards as in MATLAB (`Tensor.round` takes them to even)."""
    return (levels + 0.5).floor().clamp(0, 255).to(torch.uint8)
