"""Super-resolution: one WDSR trained for all widths, and individually trained baselines.

WDSR has weight norm and no batch norm, so nothing has to be calibrated: after training, any width
can be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.app.runs.loop import Training, load_final, save_final, scheduled_rate, train
from anywidth.app.runs.run import Run
from anywidth.app.tasks.registry import Task
from anywidth.app.tasks.starting_network import start_with_weights
from anywidth.app.tasks.super_resolution.command import upscale as upscale_command
from anywidth.app.tasks.super_resolution.crops import crop_sections
from anywidth.app.tasks.super_resolution.deployment import deployed_upscaler, upscaler_examples
from anywidth.app.tasks.super_resolution.judged_patches import judged_by_patches
from anywidth.app.tasks.super_resolution.networks import build_model
from anywidth.app.tasks.super_resolution.patches import PatchLoader
from anywidth.app.tasks.super_resolution.picture_sets import (
    load_evaluation_sets,
    split_pictures,
)
from anywidth.app.tasks.super_resolution.pictures import (
    PicturePairs,
)
from anywidth.app.tasks.super_resolution.recipes import RECIPES
from anywidth.app.tasks.super_resolution.settings import SuperResolutionSettings
from anywidth.app.tasks.super_resolution.upscaling import Sets, evaluate, mean_psnr
from anywidth.app.tasks.task_settings import arithmetic_of, read_settings
from anywidth.app.tasks.trained import Judging, Trained
from anywidth.distributed import local_device, rank, world_size
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import Metric
from anywidth.models.wdsr import WDSR
from anywidth.slimming.convert import at_width
from anywidth.training.precision import tf32_arithmetic
from anywidth.training.step import Loss, SandwichStep, StepResult


def distillation_of(settings: SuperResolutionSettings) -> Loss | None:
    """The loss of narrower widths besides the true patches, whose share is `truth`.

    Pulling a narrow width towards the widest also moves the weights that they share. An absolute
    error pulls equally hard however close the two are, and wins over the truth: alone (`truth=0`)
    it makes all widths alike and none better than bicubic. A squared error fades as they come
    close, and does not have this problem.
    """
    if settings.method == "i" or settings.distill == "none":
        return None
    return F.l1_loss if settings.distill == "l1" else F.mse_loss


def make_loader(
    settings: SuperResolutionSettings, pairs: PicturePairs, device: torch.device
) -> PatchLoader:
    return PatchLoader(
        pairs,
        batch_size=settings.batch_size,
        patch=settings.patch,
        samples=settings.steps_per_epoch * settings.batch_size,
        seed=settings.seed,
        device=device,
        pictures_on_device=_fits(pairs, device),
        rank=rank(),
        world_size=world_size(),
    )


def _fits(pairs: PicturePairs, device: torch.device) -> bool:
    """Whether all pictures fit into half of the device's free memory."""
    if device.type != "cuda":
        return True
    needed = pairs.low.pixels.numel() + pairs.high.pixels.numel()
    return needed < torch.cuda.mem_get_info(device)[0] // 2


# ---- training ------------------------------------------------------------------------------------


def train_run(run: Run, settings: SuperResolutionSettings) -> bool:
    """Train or resume a run until its last step; false if it was interrupted."""
    device = local_device(settings.device)
    precision = arithmetic_of(settings.precision, device)
    pictures, _ = split_pictures(settings)
    run.keep_data(pictures.facts())
    loader = make_loader(settings, pictures, device)
    sets = load_evaluation_sets(settings)
    model = build_model(settings).to(device)
    start_with_weights(run, model, settings)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=settings.learning_rate, fused=device.type == "cuda"
    )
    step = SandwichStep(
        model,
        optimizer,
        F.l1_loss,
        distillation_of(settings),
        settings.sampling(),
        truth=settings.truth,
        **settings.step_options(),
        autocast=torch.bfloat16 if precision == "bfloat16" else None,
    )
    total = settings.epochs * len(loader)
    training = Training(
        run,
        step,
        loader,
        settings.epochs,
        lambda number: scheduled_rate(
            number, total, settings.warmup_steps, settings.learning_rate, "cosine"
        ),
        partial(_measure, _ends(settings)),
        partial(_validate, model, sets, settings),
        settings.validate_every,
        settings.log_every,
        settings.checkpoint_every,
        description=settings.name,
    )
    with tf32_arithmetic(precision != "float32"):
        if not train(training):
            return False
    if step.ema is not None:
        step.ema.copy_to(model)
    save_final(run, model, {"steps": step.count})
    return True


def _ends(settings: SuperResolutionSettings) -> list[float]:
    """The widths that are logged and validated, widest first."""
    return [settings.width] if settings.method == "i" else [settings.high, settings.low]


def _measure(ends: Sequence[float], result: StepResult, targets: Tensor) -> dict[str, Tensor]:
    """The distance to the true patches at both ends of the widths."""
    outputs = result.outputs[: len(ends)]
    return {
        f"loss/{width}": F.l1_loss(output.float(), targets)
        for width, output in zip(ends, outputs, strict=True)
    }


def _validate(model: WDSR, sets: Sets, settings: SuperResolutionSettings) -> dict[str, float]:
    """PSNR on the first few pictures."""
    values = {}
    model.eval()
    for width in _ends(settings):
        with at_width(model, settings.own_width(model, width)):
            found = mean_psnr(model, sets, settings.validation_pictures)
            values[f"validation_psnr/{width}"] = found
    model.train()
    return values


# ---- after training ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedUpscaler(Trained):
    """A finished run: its trained network, and the evaluation pictures if loaded."""

    settings: SuperResolutionSettings
    model: WDSR
    sets: Sets | None

    metrics: ClassVar[Mapping[str, Metric]] = {
        "psnr": Metric("PSNR, dB", 2),
        "ssim": Metric("SSIM", 4),
    }
    curves: ClassVar[Mapping[str, str]] = {
        "loss": "loss",
        "validation_psnr": "validation PSNR, dB",
    }
    sections_need_data: ClassVar[bool] = True

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
        pictures, held_out = split_pictures(self.settings)
        self.run.check_data(pictures.facts())
        return judged_by_patches(self, pictures, held_out, seed)

    deployment = deployed_upscaler
    examples = upscaler_examples
    sections = crop_sections

    def pictures(self) -> Sets:
        if self.sets is None:
            raise AnywidthError(f"the pictures of {self.run.folder} were not loaded")
        return self.sets


def open_trained(
    folder: str | Path,
    device: str = "auto",
    with_data: bool = True,
    settings: SuperResolutionSettings | None = None,
) -> TrainedUpscaler:
    """Load a finished run to evaluate or upscale.

    `settings` replace the run's own, for pictures that have moved.
    """
    run = Run.open_finished(folder, writing=rank() == 0)
    settings = settings or read_settings(run, SuperResolutionSettings)
    model = build_model(settings)
    load_final(model, run)
    model.to(local_device(device)).eval()
    return TrainedUpscaler(
        run, settings, model, load_evaluation_sets(settings) if with_data else None
    )


TASK = Task(
    SuperResolutionSettings, TrainedUpscaler, train_run, open_trained, RECIPES, upscale_command
)
