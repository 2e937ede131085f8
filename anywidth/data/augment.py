"""Augmentation of a whole batch at once, on whatever device the batch is on.

Every image draws its own parameters. Nothing waits for the device: all shapes are known
beforehand, and choices are made by index and mask arithmetic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anywidth.errors import AnywidthError

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow turns colours into grey
PARAMETERS = 8


@dataclass(frozen=True)
class Augmentation:
    """What happens to training images; a zero switches the part off.

    ``crop_padding`` shifts the image by up to so many pixels, and what comes in at the edge is the
    reflected image or, without ``reflect``, black. ``cutout`` is the side of a square that is
    blanked around a random pixel. ``brightness``, ``contrast`` and ``saturation`` scale by a factor
    within 1 +- the given strength, in this order.
    """

    flip: bool = True
    crop_padding: int = 4
    reflect: bool = True
    cutout: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self) -> None:
        for field in ("crop_padding", "cutout", "brightness", "contrast", "saturation"):
            if getattr(self, field) < 0:
                raise AnywidthError(
                    f"Augmentation({field}={getattr(self, field)}): expected 0 (off) or more"
                )


def augment(
    images: Tensor,
    augmentation: Augmentation,
    generator: torch.Generator,
    mean: Tensor | None = None,
    std: Tensor | None = None,
) -> Tensor:
    """Augment a batch (samples x channels x height x width) with parameters from ``generator``.

    Images are uint8, or floating point from 0 to 1; the generator is one of their device. With
    ``mean`` and ``std``, one value a channel on the scale from 0 to 1, the result is normalised
    and cutout squares hold the mean; without, shape and type stay and the squares are black.
    """
    parameters = draw_parameters(len(images), generator)
    images = apply_parameters(images, augmentation, parameters, fill=mean)
    if mean is None or std is None:
        return images
    return normalize(images, mean, std)


def draw_parameters(count: int, generator: torch.Generator) -> Tensor:
    """Draw what ``apply_parameters`` needs for ``count`` images, one column an image.

    All rows are drawn whatever is switched on, so that one option does not change the others.
    """
    return torch.rand((PARAMETERS, count), generator=generator, device=generator.device)


def apply_parameters(
    images: Tensor, augmentation: Augmentation, parameters: Tensor, fill: Tensor | None = None
) -> Tensor:
    """Augment a batch with drawn parameters; ``fill`` is the colour (0 to 1) of cutout squares."""
    _check_batch(images, augmentation)
    flip, shift_y, shift_x, cut_y, cut_x, *factors = parameters.unbind()
    if augmentation.flip or augmentation.crop_padding:
        images = _crop_and_flip(images, augmentation, flip, shift_y, shift_x)
    if augmentation.brightness or augmentation.contrast or augmentation.saturation:
        images = _jitter(images, augmentation, factors)
    if augmentation.cutout:
        images = _cut_out(images, augmentation.cutout, cut_y, cut_x, fill)
    return images


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return ``(images - mean) / std`` in floating point, uint8 being scaled to 0..1 first."""
    scale = std.reciprocal()
    shift = -mean * scale
    if images.dtype == torch.uint8:
        scale = scale / 255
    return images.mul(scale.view(-1, 1, 1)).add_(shift.view(-1, 1, 1))


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of uint8 images, on the scale 0 to 1.

    A channel without contrast gets the deviation of one grey level, so that it can be divided by.
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
            f"a batch is {images.dtype} of shape {tuple(images.shape)}: expected uint8 or floating "
            "point of shape (samples, channels, height, width)"
        )
    channels, *sides = images.shape[1:]
    if augmentation.crop_padding >= min(sides):
        raise AnywidthError(
            f"crop_padding={augmentation.crop_padding} shifts images of {sides[0]} x {sides[1]} "
            f"pixels out of view: expected at most {min(sides) - 1}"
        )
    if augmentation.saturation and channels not in (1, 3):
        raise AnywidthError(
            f"saturation={augmentation.saturation} needs images of 1 or 3 channels, these have "
            f"{channels}: pass saturation=0"
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
    source_rows, source_columns = _reflect(rows, height), _reflect(columns, width)
    source = source_rows[:, :, None] * width + source_columns[:, None, :]
    source = source.view(count, 1, height * width).expand(-1, channels, -1)
    result = images.flatten(2).gather(2, source).view_as(images)
    if padding and not augmentation.reflect:
        inside = (source_rows == rows)[:, :, None] & (source_columns == columns)[:, None, :]
        result = result * inside[:, None]
    return result


def _reflect(positions: Tensor, size: int) -> Tensor:
    """Mirror positions beyond an edge back into the image, without repeating the edge."""
    return (size - 1) - ((size - 1) - positions.abs()).abs()


def _below(uniform: Tensor, limit: int) -> Tensor:
    """Turn draws from [0, 1) into whole numbers from 0 to ``limit - 1``."""
    # The product of the largest float below one and the limit may round up to the limit.
    return (uniform * limit).long().clamp_(max=limit - 1)


def _cut_out(
    images: Tensor, side: int, cut_y: Tensor, cut_x: Tensor, fill: Tensor | None
) -> Tensor:
    height, width = images.shape[2:]
    top = _below(cut_y, height)[:, None] - side // 2
    left = _below(cut_x, width)[:, None] - side // 2
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    in_rows = (rows >= top) & (rows < top + side)
    in_columns = (columns >= left) & (columns < left + side)
    square = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
    if fill is None:
        return images.masked_fill(square, 0)
    if images.dtype == torch.uint8:
        fill = (fill * 255).round()
    return torch.where(square, fill.to(images.dtype).view(-1, 1, 1), images)


def _jitter(images: Tensor, augmentation: Augmentation, factors: list[Tensor]) -> Tensor:
    values = images.float().div(255) if images.dtype == torch.uint8 else images
    brightness, contrast, saturation = factors
    if augmentation.brightness:
        factor = _factor(brightness, augmentation.brightness, values)
        values = (values * factor).clamp_(0, 1)
    if augmentation.contrast:
        grey = _to_grey(values).mean((1, 2, 3), keepdim=True)
        values = _blend(values, grey, _factor(contrast, augmentation.contrast, values))
    if augmentation.saturation and images.shape[1] == 3:
        factor = _factor(saturation, augmentation.saturation, values)
        values = _blend(values, _to_grey(values), factor)
    if images.dtype == torch.uint8:
        return values.mul(255).round_().to(torch.uint8)
    return values


def _factor(uniform: Tensor, strength: float, values: Tensor) -> Tensor:
    low, high = max(0.0, 1 - strength), 1 + strength
    return (low + (high - low) * uniform).to(values.dtype).view(-1, 1, 1, 1)


def _to_grey(values: Tensor) -> Tensor:
    if values.shape[1] != 3:
        return values.mean(1, keepdim=True)
    red, green, blue = values.split(1, dim=1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


def _blend(values: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(other.expand_as(values), values, factor.expand_as(values)).clamp_(0, 1)
