"""Super-resolution: one WDSR trained for all widths, and individually trained baselines.

WDSR has weight norm and no batch norm, so nothing has to be calibrated: after training, any width
can be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from anywidth.app.runs.loop import Training, save_final, scheduled_rate, train
from anywidth.app.runs.run import Run
from anywidth.app.tasks.registry import Task
from anywidth.app.tasks.starting_network import start_with_weights
from anywidth.app.tasks.super_resolution.command import upscale as upscale_command
from anywidth.app.tasks.super_resolution.networks import build_model
from anywidth.app.tasks.super_resolution.patches import PatchLoader
from anywidth.app.tasks.super_resolution.pictures import (
    PicturePairs,
    load_evaluation_sets,
    split_pictures,
)
from anywidth.app.tasks.super_resolution.recipes import RECIPES
from anywidth.app.tasks.super_resolution.settings import SuperResolutionSettings
from anywidth.app.tasks.super_resolution.trained import TrainedUpscaler
from anywidth.app.tasks.super_resolution.upscaling import Sets, mean_psnr
from anywidth.app.tasks.task_settings import arithmetic_of
from anywidth.distributed import local_device, rank, world_size
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


TASK = Task(SuperResolutionSettings, TrainedUpscaler, train_run, RECIPES, upscale_command)
open_trained = TASK.open
