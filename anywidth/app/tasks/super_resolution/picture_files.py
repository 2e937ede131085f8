"""Image files taken apart for upscaling, and put together again."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from anywidth.app.tasks.super_resolution.resize import upscale
from anywidth.errors import AnywidthError
from anywidth.files import write_atomically


@dataclass(frozen=True)
class Picture:
    """An image file taken apart.

    Args:
        color: (1, 3, H, W) in [0, 1]; grey pictures have three equal channels.
        alpha: (1, 1, H, W) in [0, 1], or None where nothing is transparent.
        is_grey: write one channel again.
        levels: 255, or 65535 for a 16-bit grey picture.
    """

    color: Tensor
    alpha: Tensor | None
    is_grey: bool
    levels: int

    def enlarged(self, color: Tensor, scale: int) -> Picture:
        """The larger picture that `color` belongs to."""
        alpha = None if self.alpha is None else upscale(self.alpha, scale).clamp(0, 1)
        return replace(self, color=color, alpha=alpha)


def read(path: Path) -> Picture:
    """Decodes an image file, turned as its EXIF data says."""
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            image.load()
    except FileNotFoundError as error:
        raise AnywidthError(f"no image {path}") from error
    except Exception as error:  # decoders of broken files raise whatever they trip over
        raise AnywidthError(f"{path} is not an image that can be read: {error}") from error
    if image.mode == "F":
        raise AnywidthError(
            f"{path}: floating-point pixels have no known range; save it with 8 or 16 bits"
        )
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 65535:
            raise AnywidthError(
                f"{path}: values from {grey.min()} to {grey.max()}, expected 0 to 65535; save it "
                "with 8 or 16 bits"
            )
        return Picture(_unit(grey, 65535).expand(-1, 3, -1, -1), None, True, 65535)
    is_grey = image.mode in ("1", "L", "LA", "La")
    alpha = None
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("LA" if is_grey else "RGBA")
        alpha = _unit(np.asarray(image.getchannel("A")), 255)
    color = _unit(np.asarray(image.convert("L" if is_grey else "RGB")), 255)
    return Picture(color.expand(-1, 3, -1, -1), alpha, is_grey, 255)


def write(path: Path, picture: Picture) -> None:
    """Writes a PNG."""
    color = picture.color.mean(1, keepdim=True) if picture.is_grey else picture.color
    planes = color if picture.alpha is None else torch.cat([color, picture.alpha], 1)
    kind = np.uint8 if picture.levels == 255 else np.uint16
    levels = (planes[0] * picture.levels + 0.5).floor().clamp(0, picture.levels)
    pixels = levels.permute(1, 2, 0).numpy().astype(kind)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    file = io.BytesIO()
    image.save(file, "PNG")
    write_atomically(path, file.getvalue())


def _unit(values: np.ndarray, levels: int) -> Tensor:
    """(H, W) or (H, W, C) levels as a (1, C, H, W) tensor in [0, 1]."""
    planes = values if values.ndim == 3 else values[..., None]
    return torch.from_numpy(planes.astype(np.float32) / levels).permute(2, 0, 1)[None]
