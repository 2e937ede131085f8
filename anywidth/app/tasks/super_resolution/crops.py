"""Crops of upscaled pictures side by side, for the report of a super-resolution run."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from anywidth.app.showing.report import Section
from anywidth.app.showing.spectrum_tables import format_width
from anywidth.app.tasks.super_resolution.image_quality import luma, psnr
from anywidth.app.tasks.super_resolution.resize import upscale
from anywidth.app.tasks.super_resolution.upscaling import Sets, predict

if TYPE_CHECKING:
    from anywidth.app.tasks.super_resolution.task import TrainedUpscaler

SIDE = 96
"""Of a crop, in pixels of the true picture."""
MAGNIFIED = 2
PICTURES = 3
WIDTHS = (0.5, 0.6, 0.8, 1.0)
GAP = 8
LABEL_HEIGHT = 34


@dataclass(frozen=True)
class Crop:
    """A square of one picture, and how much of it bicubic upscaling loses."""

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
    """For the most detailed pictures: bicubic, several widths and the truth, in one strip each."""
    known = trained.widths
    widths = [width for width in WIDTHS if min(known) <= width <= max(known)] or known[:1]
    sections = []
    for crop in most_detailed(trained.pictures(), PICTURES):
        shown = {"bicubic": crop.bicubic}
        for width in widths:
            with trained.at(width):
                shown[f"width {format_width(width)}"] = predict(trained.model, crop.low).cpu()
        scores = {name: _psnr(crop, picture) for name, picture in shown.items()}
        strip = _strip(crop, {**shown, "ground truth": crop.high}, scores)
        caption = f"{crop.name}: where bicubic upscaling loses most. PSNR is that of the crop."
        sections.append(Section("Crops", image=strip, caption=caption))
    return sections


def most_detailed(sets: Sets, count: int) -> list[Crop]:
    """The squares that bicubic upscaling is furthest from the truth in, one a picture."""
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


def _strip(crop: Crop, pictures: dict[str, Tensor], scores: dict[str, float]) -> bytes:
    """The crops in a row with a label below each, as a PNG file."""
    side = crop.side * MAGNIFIED
    width = len(pictures) * (side + GAP) - GAP
    canvas = Image.new("RGB", (width, side + LABEL_HEIGHT), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(13)
    for position, (label, picture) in enumerate(pictures.items()):
        pixels = crop.cut(picture).permute(1, 2, 0).contiguous().to(torch.uint8).numpy()
        tile = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
        left = position * (side + GAP)
        canvas.paste(tile, (left, 0))
        lines = f"{label}\n{scores[label]:.2f} dB" if label in scores else label
        draw.multiline_text((left, side + 2), lines, fill="black", font=font, spacing=1)
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return file.getvalue()
