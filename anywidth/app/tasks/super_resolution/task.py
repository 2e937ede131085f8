"""Super-resolution: one WDSR trained for all widths, and individually trained ones beside it.

WDSR has weight norm and no batch norm, so nothing has to be calibrated: any width can be run as
soon as training has ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.app.runs.loop import Training, load_weights, save_final, train
from anywidth.app.runs.run import Run
from anywidth.app.showing.report import Section
from anywidth.app.tasks.examples import Example
from anywidth.app.tasks.registry import Task
from anywidth.app.tasks.super_resolution.command import upscale as upscale_command
from anywidth.app.tasks.super_resolution.crops import crop_sections
from anywidth.app.tasks.super_resolution.deployment import deployed_upscaler, upscaler_examples
from anywidth.app.tasks.super_resolution.image_quality import WINDOW
from anywidth.app.tasks.super_resolution.patches import PatchLoader
from anywidth.app.tasks.super_resolution.pictures import (
    BUNDLED,
    PicturePairs,
    find_images,
    load_pairs,
)
from anywidth.app.tasks.super_resolution.recipes import RECIPES
from anywidth.app.tasks.super_resolution.resize import upscale
from anywidth.app.tasks.super_resolution.settings import SuperResolutionSettings
from anywidth.app.tasks.super_resolution.upscaling import Sets, evaluate, mean_psnr
from anywidth.app.tasks.task_settings import arithmetic_of
from anywidth.app.tasks.trained import Trained
from anywidth.deploying.deployment import Deployment
from anywidth.distributed import local_device, rank, world_size
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import Metric
from anywidth.models.wdsr import WDSR, wdsr
from anywidth.planning.trace import plan as make_plan
from anywidth.slimming.convert import at_width, slimmable
from anywidth.training.precision import tf32_arithmetic
from anywidth.training.step import Loss, SandwichStep, StepResult
from anywidth.width import WidthRange, round_channels

EXAMPLE_SIDE = 48
"""Multiply-adds are counted for a low-resolution input of 48x48, as in the paper."""


# ---- data, network, optimiser --------------------------------------------------------------------


def load_training_pictures(settings: SuperResolutionSettings) -> PicturePairs:
    folder = BUNDLED / "train"
    if settings.data_dir is not None:
        folder = _folder(settings.data_dir, "--data-dir")
    return load_pairs(folder, settings.scale, patch=settings.patch, cache=settings.cache_dir)


def load_evaluation_sets(settings: SuperResolutionSettings) -> dict[str, PicturePairs]:
    """The pictures to evaluate on by the name of their set, the smallest set first."""
    # Inside the border that is cut, SSIM needs room for its window.
    smallest = math.ceil((WINDOW + 2 * settings.scale) / settings.scale)
    sets = {
        name: load_pairs(
            folder,
            settings.scale,
            split="valid",
            patch=smallest,
            cache=settings.cache_dir,
            subfolders=subfolders,
        )
        for name, (folder, subfolders) in _evaluation_folders(settings).items()
    }
    return dict(sorted(sets.items(), key=lambda item: (len(item[1]), item[0])))


def _evaluation_folders(settings: SuperResolutionSettings) -> dict[str, tuple[Path, bool]]:
    """Each set's folder, and whether its subfolders are part of it.

    These are the subfolders of `eval_dir`, and the pictures beside them as one more set; else
    DIV2K's validation pictures; else the bundled ones.
    """
    given = settings.eval_dir or settings.data_dir
    if given is not None and (Path(given) / "DIV2K_valid_HR").is_dir():
        return {"DIV2K": (Path(given), True)}
    if settings.eval_dir is None:
        return {"bundled": (BUNDLED / "eval", True)}
    folder = _folder(settings.eval_dir, "--eval-dir")
    paths = find_images(folder)
    inside = {path.relative_to(folder).parts[0] for path in paths if path.parent != folder}
    found = {name: (folder / name, True) for name in inside if not name.startswith(".")}
    own = folder.resolve().name
    if any(path.parent == folder for path in paths):
        found[f"{own} itself" if own in found else own] = (folder, False)
    return found or {own: (folder, True)}


def _folder(place: str, option: str) -> Path:
    if not Path(place).is_dir():
        raise AnywidthError(
            f"{place} is no folder: say where the pictures lie with {option} FOLDER"
        )
    return Path(place)


def build_model(settings: SuperResolutionSettings) -> WDSR:
    """The converted network of a configuration, with its initial weights.

    At width k / channels it is the WDSR of k channels: inside each block the wide activation is
    kept at its multiple of what the block carries, where rounding alone could miss by one.
    """
    torch.manual_seed(settings.seed)
    channels, widths = settings.channels, settings.width_range
    if settings.method == "i":
        # Built for its width: the initial weights know their own fan-in.
        channels = min(channels, round_channels(channels * settings.width, settings.divisor))
        widths = WidthRange(1.0, 1.0, settings.divisor)
    model = wdsr(channels, settings.blocks, settings.scale)
    if settings.bicubic_start:
        start_from_bicubic(model)
    plan = make_plan(model, torch.rand(2, 3, EXAMPLE_SIDE, EXAMPLE_SIDE))
    carried = plan.group_of("head")
    for block in range(settings.blocks):
        wide = plan.group_of(f"body.{block}.widen")
        plan.tie(wide.name, carried.name, wide.channels // carried.channels)
    slimmable(model, plan, widths)
    return model


@torch.no_grad()
def start_from_bicubic(model: WDSR) -> None:
    """Sets the 5x5 skip to bicubic upscaling and turns the deep branch down to a tenth.

    From random weights the first hundred steps or more only bring a network up to bicubic.
    """
    radius, scale = 2, model.scale
    impulse = torch.zeros(1, 1, 4 * radius + 1, 4 * radius + 1)
    impulse[..., 2 * radius, 2 * radius] = 1
    # Column d of phase p is what the impulse gives d pixels before it: a correlation's kernel.
    around = slice(radius * scale, (3 * radius + 1) * scale)
    response = upscale(impulse, scale)[0, 0, around, around]
    phases = response.unflatten(0, (-1, scale)).unflatten(2, (-1, scale)).permute(1, 3, 0, 2)
    kernels = phases.flip(2, 3).flatten(0, 1)
    weight = torch.zeros_like(model.skip.weight)
    for channel in range(weight.shape[1]):
        weight[channel * scale**2 : (channel + 1) * scale**2, channel] = kernels
    model.skip.weight = weight
    nn.init.zeros_(_bias(model.skip))
    nn.init.zeros_(_bias(model.tail))
    model.tail.weight = 0.1 * model.tail.weight


def _bias(layer: nn.Conv2d) -> Tensor:
    assert layer.bias is not None
    return layer.bias


def distillation_of(settings: SuperResolutionSettings) -> Loss | None:
    """What narrower widths learn beside the true patches, whose share is `truth`.

    Pulling a narrow width towards the widest also moves the weights they share, and with them the
    widest. An absolute error pulls as hard however close the two are, and wins over the truth:
    alone (`truth=0`) it leaves all widths alike and none better than bicubic. A squared error
    fades as they come close and does not.
    """
    if settings.method == "i" or settings.distill == "none":
        return None
    return F.l1_loss if settings.distill == "l1" else F.mse_loss


def learning_rate(step: int, total: int, warmup: int, highest: float) -> float:
    """Half a cosine wave to zero over all steps, after a linear rise if there is one."""
    if step < warmup:
        return highest * (step + 1) / warmup
    return highest * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


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
    """Whether all pictures leave the device half of its free memory."""
    if device.type != "cuda":
        return True
    needed = pairs.low.pixels.numel() + pairs.high.pixels.numel()
    return needed < torch.cuda.mem_get_info(device)[0] // 2


# ---- training ------------------------------------------------------------------------------------


def train_run(run: Run, settings: SuperResolutionSettings) -> bool:
    """Trains until the last step, or an interrupt (then false); resumes where the run left off."""
    device = local_device(settings.device)
    precision = arithmetic_of(settings.precision, device)
    loader = make_loader(settings, load_training_pictures(settings), device)
    sets = load_evaluation_sets(settings)
    model = build_model(settings).to(device)
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
        autocast=torch.bfloat16 if precision == "bfloat16" else None,
    )
    total = settings.epochs * len(loader)
    training = Training(
        run,
        step,
        loader,
        settings.epochs,
        lambda number: learning_rate(number, total, settings.warmup_steps, settings.learning_rate),
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
    save_final(run, model, {"steps": step.count})
    return True


def _ends(settings: SuperResolutionSettings) -> list[float]:
    """The widths that are logged and validated, widest first."""
    return [settings.width] if settings.method == "i" else [settings.high, settings.low]


def _measure(ends: Sequence[float], result: StepResult, targets: Tensor) -> dict[str, Tensor]:
    """The distance to the true patches at both ends, whatever each of them is trained on."""
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
    """A finished run: its network as trained, and the pictures to evaluate on if asked for."""

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

    def deployment(self) -> Deployment:
        return deployed_upscaler(self)

    def examples(self) -> list[Example]:
        return upscaler_examples(self)

    def sections(self) -> list[Section]:
        """Crops at several widths, beside bicubic and the truth."""
        return crop_sections(self)

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
    """Loads a finished run for evaluating or upscaling.

    A `settings` given stands for the run's own: its pictures may lie elsewhere by now.
    """
    run = Run.open_finished(folder, writing=rank() == 0)
    settings = settings or run.read_settings(SuperResolutionSettings)
    model = build_model(settings)
    load_weights(model, run.model_tensors(), run.folder)
    model.to(local_device(device)).eval()
    return TrainedUpscaler(
        run, settings, model, load_evaluation_sets(settings) if with_data else None
    )


TASK = Task(
    SuperResolutionSettings, TrainedUpscaler, train_run, open_trained, RECIPES, upscale_command
)
