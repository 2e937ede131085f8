"""Image classification: one network trained for all widths, and its baselines.

The same code trains a universally slimmable network (US-Net), a slimmable one with a few switches
(S-Net) and an individually trained one (I-Net), by `ClassificationSettings.method`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.app.data.augment import Augmentation
from anywidth.app.data.classification import ClassificationData, Epochs, load_classification
from anywidth.app.data.order import ImageLoader
from anywidth.app.runs.loop import Training, load_final, save_final, scheduled_rate, train
from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.command import predict
from anywidth.app.tasks.classification.deployment import classifier_examples, deployed_classifier
from anywidth.app.tasks.classification.final_state import read_state
from anywidth.app.tasks.classification.networks import build_model, check_logits
from anywidth.app.tasks.classification.optimization import (
    PRECISIONS,
    clipping_of,
    distillation_of,
    loss_of,
    make_optimizer,
)
from anywidth.app.tasks.classification.recipes import RECIPES
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.app.tasks.registry import Task
from anywidth.app.tasks.starting_network import start_with_weights
from anywidth.app.tasks.task_settings import read_settings
from anywidth.app.tasks.trained import Judging, Trained
from anywidth.distributed import barrier, local_device, rank, sum_over_ranks, world_size
from anywidth.errors import AnywidthError
from anywidth.measuring.progress import training_progress
from anywidth.measuring.spectra import STANDARD_ERROR, Metric, standard_error_of_share
from anywidth.slimming.convert import at_width, plan_of
from anywidth.training.calibration import calibrate
from anywidth.training.gpu.fast_layers import use_kernels
from anywidth.training.norm_tuning import tune_norms
from anywidth.training.statistics_state import statistics_to_tensors
from anywidth.training.step import SandwichStep, StepResult
from anywidth.width import Width

_JUDGED = 2000
"""The most images that a search judges a network by, and calibrates finalists with."""

# ---- data ----------------------------------------------------------------------------------------


def load_data(
    settings: ClassificationSettings, device: torch.device, *, shared: bool = False
) -> ClassificationData:
    """The data of a run; with `shared`, each rank gets its part of every batch."""
    augmentation: Any = Augmentation(settings.flip, settings.crop_padding, cutout=settings.cutout)
    if settings.data not in ("bundled", "fashion_mnist", "cifar10", "cifar100"):
        from anywidth.app.data.folder_augment import FolderAugmentation

        augmentation = FolderAugmentation(flip=settings.flip)
    return load_classification(
        settings.data,
        settings.data_dir,
        batch_size=settings.batch_size,
        evaluation_batch_size=settings.evaluation_batch_size,
        augmentation=augmentation,
        seed=settings.seed,
        device=device,
        rank=rank() if shared else 0,
        world_size=world_size() if shared else 1,
        workers=settings.workers,
        image_size=settings.image_size,
        limit=settings.limit,
        validation=settings.validation,
        skip_corrupt=settings.skip_corrupt,
        held_out=settings.held_out,
    )


def calibration_images(
    data: ClassificationData, settings: ClassificationSettings, samples: int | None = None
) -> Any:
    """Training images for batch-norm statistics: `samples` random ones, or all."""
    loader: Any = data.calibration
    if settings.calibration_augmented:
        size = settings.evaluation_batch_size
        loader = data.train.subset(
            data.train.samples, settings.seed, batch_size=size, augmented=True
        )
    if samples is None or samples >= loader.samples:
        return loader
    return loader.subset(samples, seed=settings.seed, augmented=True)


# ---- training ------------------------------------------------------------------------------------


def train_run(run: Run, settings: ClassificationSettings) -> bool:
    """Train or resume a run until its last epoch; false if it was interrupted."""
    device = local_device(settings.device)
    data = load_data(settings, device, shared=True)
    run.keep_data(data.facts())
    if len(data.classes) < 2:
        raise AnywidthError(
            f"the data has only one class, {data.classes[0]!r}: expected at least two folders of "
            "images in train/"
        )
    if rank() == 0:
        data.check_files(skip_corrupt=settings.skip_corrupt, remember=run.is_kept)
    barrier()
    model = build_model(
        settings, len(data.classes), data.input_shape, is_new=not run.has_checkpoint
    )
    if ":" in settings.model:  # the zoo's networks are known
        check_logits(model, len(data.classes), data.input_shape, settings.model)
    model.to(device)
    start_with_weights(run, model, settings)
    step = make_step(model, settings)
    if settings.lattice is not None and settings.method == "us" and device.type == "cuda":
        # Capture all configurations before training.
        images, labels = next(iter(data.train.epoch(0)))
        plan, drawn = plan_of(model), settings.sampling().configurations(model)
        step.warm_up([plan.widest, *reversed(drawn), plan.narrowest], images, labels)
    total = settings.epochs * len(data.train)
    warmup = round(settings.warmup_epochs * len(data.train))
    training = Training(
        run,
        step,
        data.train,
        settings.epochs,
        lambda number: scheduled_rate(
            number, total, warmup, settings.learning_rate, settings.schedule
        ),
        _measure,
        partial(_validate, model, data.validation, settings),
        settings.validate_every,
        settings.log_every,
        settings.checkpoint_every,
    )
    if not train(training):
        return False
    if step.ema is not None:
        # Of all ranks' images: each rank computes the same statistics.
        whole = data if world_size() == 1 else load_data(settings, device)
        step.ema.copy_to(model, calibration_images(whole, settings, settings.calibration_samples))
    state = {
        "steps": step.count,
        "classes": list(data.classes),
        "input_shape": list(data.input_shape),
        "mean": list(data.mean),
        "std": list(data.std),
    }
    save_final(run, model, state)
    return True


def make_step(model: nn.Module, settings: ClassificationSettings) -> SandwichStep:
    return SandwichStep(
        model,
        make_optimizer(model, settings),
        loss_of(settings),
        distillation_of(settings),
        settings.sampling(),
        truth=settings.truth,
        **settings.step_options(),
        autocast=PRECISIONS[settings.precision],
        # Configurations that are never drawn again are not worth capturing.
        engine="eager" if settings.nonuniform and settings.lattice is None else "auto",
        kernels=settings.kernels,
        after_backward=clipping_of(model, settings),
    )


def _measure(result: StepResult, labels: Tensor) -> dict[str, Tensor]:
    """Loss and accuracy of the batch, at the widest and the narrowest width of the step."""
    sizes = [sum(n for _, n in config.items()) for config in result.widths]
    ends = {"max": sizes.index(max(sizes)), "min": sizes.index(min(sizes))}
    if len(sizes) == 1:
        del ends["min"]
    values: dict[str, Tensor] = {}
    for name, index in ends.items():
        correct = result.outputs[index].argmax(1) == labels
        values[f"loss_{name}"] = result.losses[index]
        values[f"accuracy_{name}"] = 100 * correct.float().mean()
    return values


def _ends(settings: ClassificationSettings) -> dict[str, float]:
    """The widths whose statistics are tracked in training, by their name in the log."""
    if settings.method == "i":
        return {"max": settings.width}
    if settings.method == "s":
        return {"max": max(settings.switches), "min": min(settings.switches)}
    ends = {"max": settings.high, "min": settings.low}
    rules = {"random": (), "min+random": ("min",), "max+random": ("max",)}
    return {name: ends[name] for name in rules.get(settings.rule, ("max", "min"))}


def _validate(
    model: nn.Module, loader: ImageLoader, settings: ClassificationSettings
) -> dict[str, float]:
    values = {}
    model.eval()
    for name, width in _ends(settings).items():
        with at_width(model, settings.own_width(model, width)):
            values[f"validation_error_{name}"] = evaluate(model, loader)["top1_error"]
    model.train()
    return values


# ---- after training ------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: nn.Module, loader: ImageLoader, *, alone: bool = False) -> dict[str, float]:
    """Errors in percent with their standard errors, and loss over a loader, at the current width.

    With several ranks, all must call it, unless it is for this rank `alone`; each may have its part
    of the batches or all of them.
    """
    device = next(model.parameters()).device
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    for images, labels in loader:
        if len(labels) == 0:
            continue
        logits = model(images.contiguous(memory_format=torch.channels_last)).float()
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        totals += torch.stack(
            [
                top[:, 0].sum(),
                top.any(1).sum(),
                F.cross_entropy(logits, labels, reduction="sum"),
                torch.full((), len(labels), device=device),
            ]
        )
    top1, top5, loss, count = (totals if alone else sum_over_ranks(totals)).tolist()
    if count == 0:
        raise AnywidthError(
            "no validation image could be read: all of them are corrupt; replace them, or hold out "
            "training images with --validation split"
        )
    errors = {"top1_error": 100 * (1 - top1 / count), "top5_error": 100 * (1 - top5 / count)}
    spread = {
        name + STANDARD_ERROR: standard_error_of_share(error, count)
        for name, error in errors.items()
    }
    return {**errors, "loss": loss / count, **spread}


@dataclass(frozen=True)
class TrainedClassifier(Trained):
    """A finished run: its trained network with statistics, and its data if loaded."""

    settings: ClassificationSettings
    data: ClassificationData | None

    metrics: ClassVar[Mapping[str, Metric]] = {
        "top1_error": Metric("top-1 error, %", 2, lower_is_better=True),
        "top5_error": Metric("top-5 error, %", 2, lower_is_better=True),
        "loss": Metric("loss", 4, lower_is_better=True),
    }
    curves: ClassVar[Mapping[str, str]] = {
        "loss": "loss",
        "accuracy": "accuracy on the batch, %",
        "validation_error": "validation error, %",
    }

    def judging(self, seed: int = 0) -> Judging:
        """By the loss, which is smoother than the error, on images kept out of training if any."""
        data = self._loaded()
        count = min(data.judging.samples, _JUDGED)
        images = data.judging.subset(
            count, seed, batch_size=min(count, self.settings.evaluation_batch_size)
        )
        kept = "kept out of training" if data.is_held_out else "that it was trained with"
        samples = min(self.settings.calibration_samples or _JUDGED, data.train.samples)
        has_norms = self.has_statistics
        return Judging(
            partial(evaluate, loader=images, alone=True),
            "loss",
            f"{count:,} training images {kept}",
            data.is_held_out,
            calibration_images(data, self.settings, samples) if has_norms else None,
        )

    def calibrate(
        self, widths: Sequence[Width], samples: int | None = None, method: str | None = None
    ) -> int:
        """Compute statistics for some widths and save them; returns the number of images.

        With several ranks, all must call it: the widths are divided among them.
        """
        if samples is None:
            samples = self.settings.calibration_samples
        if samples is not None and samples < 2:
            raise AnywidthError(f"--samples {samples}: batch statistics need at least 2")
        loader = calibration_images(self._loaded(), self.settings, samples)
        chosen: Any = method or self.settings.calibration_method
        own = [self.own_width(width) for width in widths]
        networks = len({plan_of(self.model).resolve(width) for width in own})
        mine = math.ceil(networks / world_size())
        with training_progress(len(loader) * mine, description="calibrating") as shown:
            calibrate(
                self.model,
                loader,
                own,
                method=chosen,
                progress=shown.update,
                process_group="world",
            )
        if rank() == 0:
            statistics = statistics_to_tensors(self.model)
            self.run.save_statistics(*statistics, model=self.model.state_dict())
        return int(loader.samples)

    def tune(self, widths: Sequence[float], epochs: int, learning_rate: float) -> int:
        """Tune scales and biases for some widths as narrower widths were trained, and save them."""
        settings, data = self.settings, self._loaded()
        loader = Epochs(data.train)
        with training_progress(epochs * len(loader), description="tuning") as shown:
            tune_norms(
                self.model,
                loader,
                [self.own_width(width) for width in widths],
                loss_of(settings),
                distillation_of(settings),
                epochs=epochs,
                learning_rate=learning_rate,
                truth=settings.truth,
                calibration=calibration_images(data, settings, settings.calibration_samples),
                progress=shown.update,
            )
        self.run.save_statistics(*statistics_to_tensors(self.model))
        return epochs * data.train.samples

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return evaluate(model, self._loaded().validation)

    @property
    def measured_on(self) -> str:
        kind = "held-out" if self.settings.validation == "split" else "test"
        return f"{self._loaded().validation.samples:,} {kind} images of {self.settings.trained_on}"

    deployment = deployed_classifier
    examples = classifier_examples

    def _loaded(self) -> ClassificationData:
        if self.data is None:
            raise AnywidthError(f"the data of {self.run.folder} was not loaded")
        return self.data


def open_trained(
    folder: str | Path,
    device: str = "auto",
    with_data: bool = True,
    settings: ClassificationSettings | None = None,
) -> TrainedClassifier:
    """Load a finished run to calibrate, evaluate or predict.

    `settings` replace the run's own, for data that has moved.
    """
    run = Run.open_finished(folder, writing=rank() == 0)
    settings = settings or read_settings(run, ClassificationSettings)
    place = local_device(device)
    state = read_state(run)
    model = build_model(settings, len(state["classes"]), state["input_shape"])
    load_final(model, run)
    model.to(place).eval()
    if place.type == "cuda":
        use_kernels(model, settings.kernels)  # otherwise every new width costs seconds
    data = load_data(settings, place) if with_data else None
    if data is not None:
        run.check_data(data.facts(), {"classes": state["classes"]})
    return TrainedClassifier(run, settings, model, data)


TASK = Task(ClassificationSettings, TrainedClassifier, train_run, open_trained, RECIPES, predict)
