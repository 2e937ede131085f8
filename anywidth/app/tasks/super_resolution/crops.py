"""Crops of upscaled pictures side by side, for the report of a super-resolution run."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from anywidth.app.showing.report import Section
from anywidth.app.showing.spectrum_tables import format_width
from anywidth.app.tasks.super_resolution.image_quality import luma, psnr
from anywidth.app.tasks.super_resolution.resize import upscale
from anywidth.app.tasks.super_resolution.upscaling import Sets, predict

if TYPE_CHECKING:
    from anywidth.app.tasks.super_resolution.task import TrainedUpscaler

SIDE = 96
"""Side of a crop, in pixels of the true picture."""
MAGNIFIED = 2
PICTURES = 3
WIDTHS = (0.5, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Crop:
    """A square of one picture, and the error of bicubic upscaling there."""

    name: str
    low: Tensor
    high: Tensor
    bicubic: Tensor
    top: int
    left: int
    side: int
    lost: float

    def cut(self, picture: Tensor) -> Tensor:
        return picture[:, self.top : self.top + self.side, self.left : self.left + self.side]


def crop_sections(trained: TrainedUpscaler) -> list[Section]:
    """One row per detailed picture: bicubic, several widths and the truth."""
    known = trained.widths
    widths = [width for width in WIDTHS if min(known) <= width <= max(known)] or known[:1]
    sections = []
    for crop in most_detailed(trained.pictures(), PICTURES):
        shown = {"bicubic": crop.bicubic}
        for width in widths:
            with trained.at(width):
                shown[f"width {format_width(width)}"] = predict(trained.model, crop.low).cpu()
        scores = {name: _psnr(crop, picture) for name, picture in shown.items()}
        images = {f"{name}\n{scores[name]:.2f} dB": _png(crop, one) for name, one in shown.items()}
        images["true picture"] = _png(crop, crop.high)
        caption = (
            f"{crop.name}: the area where bicubic upscaling is worst. PSNR is that of the crop."
        )
        sections.append(Section("Crops", images=images, caption=caption))
    return sections


def most_detailed(sets: Sets, count: int) -> list[Crop]:
    """The squares with the largest error of bicubic upscaling, one per picture."""
    crops = []
    for set_name, pairs in sets.items():
        for index, name in enumerate(pairs.names):
            low, high = pairs[index]
            bicubic = upscale(low[None], pairs.scale)[0]
            side = min(SIDE, *high.shape[-2:])
            error = (luma(high[None]) - luma(bicubic[None])).square()
            means = F.avg_pool2d(error, side, stride=max(1, side // 8))[0, 0]
            best = int(means.argmax())
            top, left = (part * max(1, side // 8) for part in divmod(best, means.shape[1]))
            lost = float(means.max())
            crops.append(Crop(f"{set_name}/{name}", low, high, bicubic, top, left, side, lost))
    return sorted(crops, key=lambda crop: -crop.lost)[:count]


def _psnr(crop: Crop, picture: Tensor) -> float:
    return float(psnr(luma(crop.cut(picture)[None]), luma(crop.cut(crop.high)[None])))


def _png(crop: Crop, picture: Tensor) -> bytes:
    """The crop as a PNG file, magnified without smoothing."""
    side = crop.side * MAGNIFIED
    pixels = crop.cut(picture).permute(1, 2, 0).contiguous().to(torch.uint8).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()
