"""Augmentation of a whole batch at once, on the device of the batch.

Every image draws its own parameters. Nothing waits for the device: all shapes are known in advance,
and choices are index and mask arithmetic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anywidth.errors import AnywidthError

# Three more than needed: on a GPU the drawn numbers depend on their count, and runs with the same
# seed must keep seeing the same images.
PARAMETERS = 8


@dataclass(frozen=True)
class Augmentation:
    """The augmentation of training images; zero switches a part off.

    ``crop_padding`` shifts the image by up to so many pixels and fills the edge with the reflected
    image. ``cutout`` is the side of a square that is blanked around a random pixel.
    """

    flip: bool = True
    crop_padding: int = 4
    cutout: int = 0

    def __post_init__(self) -> None:
        for field in ("crop_padding", "cutout"):
            if getattr(self, field) < 0:
                raise AnywidthError(
                    f"Augmentation({field}={getattr(self, field)}): expected 0 (off) or more"
                )


def draw_parameters(count: int, generator: torch.Generator) -> Tensor:
    """Draw the random numbers of ``apply_parameters`` for ``count`` images, one column each.

    All rows are always drawn, so that switching one option does not change the others.
    """
    return torch.rand((PARAMETERS, count), generator=generator, device=generator.device)


def apply_parameters(
    images: Tensor, augmentation: Augmentation, parameters: Tensor, fill: Tensor
) -> Tensor:
    """Augment a batch with drawn parameters; ``fill`` is the colour (0 to 1) of cutout squares."""
    _check_batch(images, augmentation)
    flip, shift_y, shift_x, cut_y, cut_x = parameters[:5].unbind()
    if augmentation.flip or augmentation.crop_padding:
        images = _crop_and_flip(images, augmentation, flip, shift_y, shift_x)
    if augmentation.cutout:
        images = _cut_out(images, augmentation.cutout, cut_y, cut_x, fill)
    return images


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return ``(images - mean) / std`` in floating point; uint8 is first scaled to 0..1."""
    scale = std.reciprocal()
    shift = -mean * scale
    if images.dtype == torch.uint8:
        scale = scale / 255
    return images.mul(scale.view(-1, 1, 1)).add_(shift.view(-1, 1, 1))


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of uint8 images, on the scale 0 to 1.

    A constant channel gets the deviation of one grey level, so that dividing by it is safe.
    """
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.cpu().unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = (share * levels).sum()
        variance = (share * (levels - mean) ** 2).sum()
        means.append(float(mean))
        deviations.append(max(float(variance.sqrt()), 1 / 255))
    return tuple(means), tuple(deviations)


def _check_batch(images: Tensor, augmentation: Augmentation) -> None:
    if images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise AnywidthError(
            f"batch of {images.dtype} and shape {tuple(images.shape)}: expected uint8 or floating "
            "point of shape (samples, channels, height, width)"
        )
    sides = images.shape[2:]
    if augmentation.crop_padding >= min(sides):
        raise AnywidthError(
            f"crop_padding={augmentation.crop_padding} shifts images of {sides[0]} x {sides[1]} "
            f"pixels out of view: expected at most {min(sides) - 1}"
        )


def _crop_and_flip(
    images: Tensor, augmentation: Augmentation, flip: Tensor, shift_y: Tensor, shift_x: Tensor
) -> Tensor:
    """Shift and mirror by one gather, from the flat position each pixel comes from."""
    count, channels, height, width = images.shape
    padding = augmentation.crop_padding
    rows = torch.arange(height, device=images.device).expand(count, height)
    columns = torch.arange(width, device=images.device).expand(count, width)
    if augmentation.flip:
        columns = torch.where((flip < 0.5)[:, None], width - 1 - columns, columns)
    if padding:
        rows = rows + _below(shift_y, 2 * padding + 1)[:, None] - padding
        columns = columns + _below(shift_x, 2 * padding + 1)[:, None] - padding
    rows, columns = _reflect(rows, height), _reflect(columns, width)
    source = rows[:, :, None] * width + columns[:, None, :]
    source = source.view(count, 1, height * width).expand(-1, channels, -1)
    return images.flatten(2).gather(2, source).view_as(images)


def _reflect(positions: Tensor, size: int) -> Tensor:
    """Mirror positions beyond an edge back into the image, without repeating the edge."""
    return (size - 1) - ((size - 1) - positions.abs()).abs()


def _below(uniform: Tensor, limit: int) -> Tensor:
    """Turn draws from [0, 1) into whole numbers from 0 to ``limit - 1``."""
    # The product of the largest float below one and the limit may round up to the limit.
    return (uniform * limit).long().clamp_(max=limit - 1)


def _cut_out(images: Tensor, side: int, cut_y: Tensor, cut_x: Tensor, fill: Tensor) -> Tensor:
    height, width = images.shape[2:]
    top = _below(cut_y, height)[:, None] - side // 2
    left = _below(cut_x, width)[:, None] - side // 2
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    in_rows = (rows >= top) & (rows < top + side)
    in_columns = (columns >= left) & (columns < left + side)
    square = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
    if images.dtype == torch.uint8:
        fill = (fill * 255).round()
    return torch.where(square, fill.to(images.dtype).view(-1, 1, 1), images)
