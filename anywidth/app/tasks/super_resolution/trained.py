"""A finished super-resolution run: its network, evaluated, judged, deployed and shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.app.runs.run import Run
from anywidth.app.showing.report import Section
from anywidth.app.showing.spectrum_tables import format_width
from anywidth.app.tasks.super_resolution.image_quality import luma, psnr
from anywidth.app.tasks.super_resolution.networks import build_model
from anywidth.app.tasks.super_resolution.patches import PatchLoader
from anywidth.app.tasks.super_resolution.pictures import load_evaluation_sets, split_pictures
from anywidth.app.tasks.super_resolution.resize import round_to_uint8, upscale
from anywidth.app.tasks.super_resolution.settings import SuperResolutionSettings
from anywidth.app.tasks.super_resolution.upscaling import Sets, evaluate, predict
from anywidth.app.tasks.trained import Example, Judging, Trained, png_bytes
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import Metric
from anywidth.models.wdsr import WDSR
from anywidth.training.precision import tf32_arithmetic
from anywidth.training.seeds import derive_seed
from anywidth.translating.deployment import Deployment

# Patches that a search judges by.
_PATCHES = 64

MOST_PICTURES = 4
# Latency is measured with a picture of this size.
_EXAMPLE_PIXELS = 64
# A larger picture would be slow on the page at every width.
_LARGEST_SIDE = 128

SIDE = 96
"""Side of a crop, in pixels of the true picture."""
MAGNIFIED = 2
PICTURES = 3
WIDTHS = (0.5, 0.6, 0.8, 1.0)


class Upscaler(nn.Module):
    """Takes (N, 3, H, W) images in [0, 1] and returns larger ones, also in [0, 1]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        larger: Tensor = self.network(images)
        return larger.clamp(0, 1)


@dataclass(frozen=True)
class TrainedUpscaler(Trained):
    """A finished run: its trained network, and the evaluation pictures if loaded."""

    settings: SuperResolutionSettings
    model: WDSR
    data: Sets | None = None

    metrics: ClassVar[Mapping[str, Metric]] = {
        "psnr": Metric("PSNR, dB", 2),
        "ssim": Metric("SSIM", 4),
    }
    curves: ClassVar[Mapping[str, str]] = {
        "loss": "loss",
        "validation_psnr": "validation PSNR, dB",
    }
    sections_need_data: ClassVar[bool] = True

    @staticmethod
    def network(run: Run, settings: SuperResolutionSettings) -> WDSR:
        return build_model(settings)

    @staticmethod
    def load_data(run: Run, settings: SuperResolutionSettings, device: torch.device) -> Sets:
        return load_evaluation_sets(settings)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, WDSR)
        return evaluate(model, self.pictures())

    @property
    def measured_on(self) -> str:
        counted = []
        for name, pairs in self.pictures().items():
            pictures = f"picture{'s' * (len(pairs) != 1)}"
            is_bundled = self.settings.eval_dir is None and name == "bundled"
            named = f"bundled {pictures}" if is_bundled else f"{pictures} of {name}"
            counted.append(f"{len(pairs)} {named}")
        return ", ".join(counted)

    def judging(self, seed: int = 0) -> Judging:
        """By pictures kept out of training if there are any; the same patches every time."""
        settings, (pictures, held_out) = self.settings, split_pictures(self.settings)
        self.run.check_data(pictures.facts())
        chosen = pictures if held_out is None else held_out
        patches = PatchLoader(
            chosen,
            batch_size=min(settings.batch_size, _PATCHES),
            patch=settings.patch,
            samples=_PATCHES,
            seed=derive_seed("judging", settings.seed, seed),
            device=next(self.model.parameters()).device,
            pictures_on_device=False,
        )
        batches = list(patches)

        def quality(model: nn.Module) -> dict[str, float]:
            scale, found = pictures.scale, []
            with tf32_arithmetic(False):
                for low, high in batches:
                    made = round_to_uint8(model(low).clamp(0, 1))
                    true = round_to_uint8(high)
                    found += psnr(luma(made), luma(true), border=scale).tolist()
            return {"psnr": sum(found) / len(found)}

        kept = "that it was trained with" if held_out is None else "kept out of training"
        count = "1 training picture" if len(chosen) == 1 else f"{len(chosen)} training pictures"
        judged_on = f"{sum(len(low) for low, _ in batches)} patches of {count} {kept}"
        return Judging(quality, "psnr", judged_on, held_out is not None)

    def deployment(self) -> Deployment:
        return Deployment(
            (torch.rand(2, 3, _EXAMPLE_PIXELS, _EXAMPLE_PIXELS),),
            ("images",),
            ("larger_images",),
            ({0: "batch", 2: "height", 3: "width"},),
            takes="images in [0, 1], red, green and blue",
            facts={"scale": str(self.model.scale)},
            task=self.settings.task,
            wrap=Upscaler,
        )

    def examples(self) -> list[Example]:
        """The middle of the first evaluation pictures, at low resolution."""
        found: list[Example] = []
        for pairs in (self.data or {}).values():
            for index, name in enumerate(pairs.names[: MOST_PICTURES - len(found)]):
                low = pairs[index][0]
                top, left = (max(0, side - _LARGEST_SIDE) // 2 for side in low.shape[-2:])
                middle = low[:, top : top + _LARGEST_SIDE, left : left + _LARGEST_SIDE]
                found.append(Example(name, middle.permute(1, 2, 0).numpy()))
        return found

    def sections(self) -> list[Section]:
        """One row per detailed picture: bicubic, several widths and the truth."""
        known = self.widths
        widths = [width for width in WIDTHS if min(known) <= width <= max(known)] or known[:1]
        sections = []
        for crop in most_detailed(self.pictures(), PICTURES):
            shown = {"bicubic": crop.bicubic}
            for width in widths:
                with self.at(width):
                    shown[f"width {format_width(width)}"] = predict(self.model, crop.low).cpu()
            true = crop.high[crop.area]
            images = {}
            for name, picture in shown.items():
                made = picture[crop.area]
                score = float(psnr(luma(made[None]), luma(true[None])))
                images[f"{name}\n{score:.2f} dB"] = _magnified(made)
            images["true picture"] = _magnified(true)
            area = "the area where bicubic upscaling is worst. PSNR is that of the crop."
            sections.append(Section("Crops", images=images, caption=f"{crop.name}: {area}"))
        return sections

    def pictures(self) -> Sets:
        if self.data is None:
            raise AnywidthError(f"the pictures of {self.run.folder} were not loaded")
        return self.data


@dataclass(frozen=True)
class Crop:
    """A square of one picture, and the error of bicubic upscaling there."""

    name: str
    low: Tensor
    high: Tensor
    bicubic: Tensor
    area: tuple[Any, ...]
    lost: float


def most_detailed(sets: Sets, count: int) -> list[Crop]:
    """The squares with the largest error of bicubic upscaling, one per picture."""
    crops = []
    for set_name, pairs in sets.items():
        for index, name in enumerate(pairs.names):
            low, high = pairs[index]
            bicubic = upscale(low[None], pairs.scale)[0]
            side = min(SIDE, *high.shape[-2:])
            stride = max(1, side // 8)
            error = (luma(high[None]) - luma(bicubic[None])).square()
            means = F.avg_pool2d(error, side, stride)[0, 0]
            corner = divmod(int(means.argmax()), means.shape[1])
            area = (..., *(slice(part * stride, part * stride + side) for part in corner))
            lost = float(means.max())
            crops.append(Crop(f"{set_name}/{name}", low, high, bicubic, area, lost))
    return sorted(crops, key=lambda crop: -crop.lost)[:count]


def _magnified(picture: Tensor) -> bytes:
    """A PNG file of the picture, enlarged without smoothing."""
    pixels = picture.permute(1, 2, 0).to(torch.uint8).numpy()
    return png_bytes(pixels.repeat(MAGNIFIED, 0).repeat(MAGNIFIED, 1))
