"""How a search judges an upscaler: PSNR of patches of training pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from anywidth.app.tasks.super_resolution.image_quality import luma, psnr
from anywidth.app.tasks.super_resolution.patches import PatchLoader
from anywidth.app.tasks.super_resolution.pictures import PicturePairs
from anywidth.app.tasks.super_resolution.resize import round_to_uint8
from anywidth.app.tasks.trained import Judging
from anywidth.training.precision import tf32_arithmetic
from anywidth.training.seeds import derive_seed

if TYPE_CHECKING:
    from anywidth.app.tasks.super_resolution.task import TrainedUpscaler

_PATCHES = 64


def judged_by_patches(
    trained: TrainedUpscaler, pictures: PicturePairs, held_out: PicturePairs | None, seed: int
) -> Judging:
    """By pictures kept out of training if there are any; the same patches every time."""
    settings = trained.settings
    chosen = pictures if held_out is None else held_out
    patches = PatchLoader(
        chosen,
        batch_size=min(settings.batch_size, _PATCHES),
        patch=settings.patch,
        samples=_PATCHES,
        seed=derive_seed("judging", settings.seed, seed),
        device=next(trained.model.parameters()).device,
        pictures_on_device=False,
    )
    batches = list(patches)

    def quality(model: nn.Module) -> dict[str, float]:
        scale, found = pictures.scale, []
        with tf32_arithmetic(False):
            for low, high in batches:
                made = round_to_uint8(model(low).clamp(0, 1))
                true = round_to_uint8(high)
                pairs = zip(made, true, strict=True)
                found += [float(psnr(luma(a[None]), luma(b[None]), border=scale)) for a, b in pairs]
        return {"psnr": sum(found) / len(found)}

    kept = "that it was trained with" if held_out is None else "kept out of training"
    count = "1 training picture" if len(chosen) == 1 else f"{len(chosen)} training pictures"
    judged_on = f"{sum(len(low) for low, _ in batches)} patches of {count} {kept}"
    return Judging(quality, "psnr", judged_on, held_out is not None)
