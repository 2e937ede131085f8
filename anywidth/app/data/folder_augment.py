"""Augmentation of photos: a crop per image in a worker, colours and mirroring per batch.

A worker cuts the crop out of its image. The rest runs on the training device for a whole batch.
Both read the same random numbers, which depend on (seed, epoch, index) and nothing else.
"""

import math
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from anywidth.errors import AnywidthError
from anywidth.training.seeds import derive_seed

# Principal components of ImageNet's colours, values in 0..1: AlexNet's, section 4.1 of its paper.
_EIGENVALUES = (0.2175, 0.0188, 0.0045)
_EIGENVECTORS = (  # one per column
    (-0.5675, 0.7192, 0.4009),
    (-0.5808, -0.0045, -0.8140),
    (-0.5836, -0.6948, 0.4203),
)
_GREY = (0.299, 0.587, 0.114)
"""The share of red, green and blue in the brightness of a pixel (BT.601, as in Pillow)."""
_RATIOS = (3 / 4, 4 / 3)
"""The least and the most width of a crop in relation to its height."""
_TRIES = 10
_ORDERS = torch.tensor(list(permutations(range(3))))
_BRIGHTNESS, _CONTRAST, _SATURATION = range(3)
_CACHED = 8
"""So many images at once fit into a processor's cache."""

COLOURS = 8
"""The numbers per image that `colour_changes` reads."""


@dataclass(frozen=True)
class FolderAugmentation:
    """The mobile augmentation of the paper's ImageNet recipe.

    A crop with ``min_area`` to all of the image's area is resized; brightness, contrast and
    saturation are scaled by factors within 1 +- ``jitter``; half of the images are mirrored.

    ``lighting`` is the deviation of AlexNet's colour noise, which adds a random multiple of each
    principal component of ImageNet's colours. It is off by default: the authors' code uses 0.1,
    but adds noise for values up to 1 to values up to 255, which changes at most one of 255 levels.
    """

    min_area: float = 0.25
    jitter: float = 0.4
    flip: bool = True
    lighting: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.min_area <= 1 or self.jitter < 0 or self.lighting < 0:
            raise AnywidthError(
                f"FolderAugmentation(min_area={self.min_area}, jitter={self.jitter}, "
                f"lighting={self.lighting}): expected 0 < min_area <= 1, jitter >= 0 and "
                "lighting >= 0"
            )


class Draws(NamedTuple):
    """The random numbers of one image: for its crop, and a row of ``COLOURS`` for its colours."""

    crop: list[float]
    colours: Tensor


def draw(seed: int, epoch: int, index: int) -> Draws:
    """Draw the numbers of an image; all are drawn, so that no option changes another's."""
    generator = torch.Generator().manual_seed(derive_seed("image", seed, epoch, index))
    uniform = torch.rand(5 + 2 + 2 * _TRIES, generator=generator)
    normal = torch.randn(3, generator=generator)
    return Draws(uniform[5:].tolist(), torch.cat([uniform[:5], normal]))


def crop_box(width: int, height: int, draws: list[float], min_area: float) -> tuple[int, ...]:
    """Left, top, right and bottom of a random crop, as in torchvision's RandomResizedCrop.

    Its area is ``min_area`` to all of the image's, its ratio 3:4 to 4:3. If no try fits into the
    image, the crop is the middle of the image, as much as has such a ratio.
    """
    least, most = map(math.log, _RATIOS)
    place_x, place_y, *tries = draws
    for share, slant in zip(tries[::2], tries[1::2], strict=True):
        area = width * height * (min_area + (1 - min_area) * share)
        ratio = math.exp(least + (most - least) * slant)
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            break
    else:
        wide = min(width, max(1, round(height * _RATIOS[1])))
        high = min(height, max(1, round(width / _RATIOS[0])))
        place_x = place_y = 0.5
    left, top = int(place_x * (width - wide + 1)), int(place_y * (height - high + 1))
    return left, top, left + wide, top + high


def colour_changes(draws: Tensor, augmentation: FolderAugmentation) -> Tensor:
    """Turn drawn numbers, one row per image, into the rows that `augment` reads.

    They are computed on the CPU, so that every device gets the same. A row has: whether to mirror;
    in the drawn order of brightness, contrast and saturation, the weights of the image, of its
    mean brightness and of its brightness per pixel; what is added to red, green and blue.
    """
    mirrored = (draws[:, :1] < 0.5) & augmentation.flip
    kinds = _ORDERS[(len(_ORDERS) * draws[:, 1]).long()]
    lowest = max(0.0, 1 - augmentation.jitter)
    factors = lowest + (1 + augmentation.jitter - lowest) * draws[:, 2:5]
    factors = factors.gather(1, kinds)
    rest = 1 - factors
    weights = torch.stack([factors, rest * (kinds == _CONTRAST), rest * (kinds == _SATURATION)], 2)
    lights = augmentation.lighting * draws[:, 5:] * torch.tensor(_EIGENVALUES)
    shifts = 255 * (lights @ torch.tensor(_EIGENVECTORS).T)
    return torch.cat([mirrored, weights.flatten(1), shifts], 1)


def augment(images: Tensor, changes: Tensor, augmentation: FolderAugmentation) -> Tensor:
    """Mirror and colour a batch (uint8, samples x height x width x channels) on its device.

    Returns floating-point levels from 0 to 255, samples x channels x height x width. Every image
    gets the same result in any batch, and on any device up to rounding.
    """
    count, height, width, channels = images.shape
    result = images.new_empty((count, channels, height, width), dtype=torch.float32)
    # A GPU takes the whole batch: launching more operations would cost more than its cache saves.
    at_once = _CACHED if images.device.type == "cpu" else max(1, count)
    for start in range(0, count, at_once):
        rows = slice(start, start + at_once)
        mirrored = changes[rows, 0].bool().view(-1, 1, 1, 1)
        part = images[rows]
        if augmentation.flip:
            part = torch.where(mirrored, part.flip(2), part)
        levels = result[rows].copy_(part.permute(0, 3, 1, 2))
        if augmentation.jitter:
            for weights in changes[rows, 1:10].view(-1, 3, 3).unbind(1):
                _scale(levels, weights)
        if augmentation.lighting:
            levels.add_(changes[rows, 10:, None, None]).clamp_(0, 255)
    return result


def _scale(levels: Tensor, weights: Tensor) -> None:
    """One of brightness, contrast and saturation per image, in place: a mix with black or grey."""
    own, mean, grey = weights[:, :, None, None].unbind(1)
    greys = levels[:, 0] * _GREY[0]
    for channel in (1, 2):
        greys.add_(levels[:, channel], alpha=_GREY[channel])
    # Summed in double precision, so that the order, which depends on the device, does not matter.
    means = (greys.sum(2).double().sum(1) / greys[0].numel()).float().view(-1, 1, 1)
    mixed = greys.mul_(grey).add_(mean * means)
    levels.mul_(own[:, None]).add_(mixed[:, None]).clamp_(0, 255)
