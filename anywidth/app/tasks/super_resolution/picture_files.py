"""Read image files for upscaling, and write the results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anywidth.app.data.image_reading import DEEP, read_image
from anywidth.app.tasks.super_resolution.resize import upscale
from anywidth.app.tasks.trained import png_bytes
from anywidth.files import write_atomically


@dataclass(frozen=True)
class Picture:
    """The contents of an image file.

    Args:
        color: (1, 3, H, W) in [0, 1]; grey pictures have three equal channels.
        alpha: (1, 1, H, W) in [0, 1], or None if nothing is transparent.
        is_grey: whether to write one channel.
        levels: 255, or 65535 for a 16-bit grey picture.
    """

    color: Tensor
    alpha: Tensor | None
    is_grey: bool
    levels: int

    def enlarged(self, color: Tensor, scale: int) -> Picture:
        """The larger picture with the colours `color`."""
        alpha = None if self.alpha is None else upscale(self.alpha, scale).clamp(0, 1)
        return replace(self, color=color, alpha=alpha)


def read(path: Path) -> Picture:
    """Decode an image file, rotated by its EXIF data."""
    image = read_image(path)
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64)
        return Picture(_unit(grey, DEEP).expand(-1, 3, -1, -1), None, True, DEEP)
    is_grey = image.mode in ("1", "L", "LA", "La")
    alpha = None
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("LA" if is_grey else "RGBA")
        alpha = _unit(np.asarray(image.getchannel("A")), 255)
    color = _unit(np.asarray(image.convert("L" if is_grey else "RGB")), 255)
    return Picture(color.expand(-1, 3, -1, -1), alpha, is_grey, 255)


def write(path: Path, picture: Picture) -> None:
    """Write a PNG file."""
    color = picture.color.mean(1, keepdim=True) if picture.is_grey else picture.color
    planes = color if picture.alpha is None else torch.cat([color, picture.alpha], 1)
    kind = np.uint8 if picture.levels == 255 else np.uint16
    levels = (planes[0] * picture.levels + 0.5).floor().clamp(0, picture.levels)
    pixels = levels.permute(1, 2, 0).numpy().astype(kind)
    write_atomically(path, png_bytes(pixels))


def _unit(values: np.ndarray, levels: int) -> Tensor:
    """(H, W) or (H, W, C) levels as a (1, C, H, W) tensor in [0, 1]."""
    planes = values if values.ndim == 3 else values[..., None]
    return torch.from_numpy(planes.astype(np.float32) / levels).permute(2, 0, 1)[None]
