"""Image classification: one network trained for all widths, and the baselines beside it.

The same code trains a universally slimmable network (US-Net), a slimmable one with a few switches
(S-Net) and an individually trained one (I-Net); `ClassificationSettings.method` says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.app.data.augment import Augmentation
from anywidth.app.data.classification import ClassificationData, Loader, load_classification
from anywidth.app.model_spec import load_model
from anywidth.app.runs.loop import RATE_SHARE, Training, load_weights, save_final, train
from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.command import predict
from anywidth.app.tasks.classification.deployment import classifier_examples, deployed_classifier
from anywidth.app.tasks.classification.recipes import RECIPES
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.app.tasks.examples import Example
from anywidth.app.tasks.independent import built_alone
from anywidth.app.tasks.registry import Task
from anywidth.app.tasks.trained import Trained
from anywidth.deploying.deployment import Deployment
from anywidth.distributed import local_device, rank, sum_over_ranks, world_size
from anywidth.errors import AnywidthError
from anywidth.measuring.progress import training_progress
from anywidth.measuring.spectra import Metric
from anywidth.models.building import initialize
from anywidth.slimming.convert import at_width, plan_of, slimmable, track_statistics
from anywidth.slimming.switchable import add_private_affine
from anywidth.training.calibration import calibrate, load_statistics, statistics_to_tensors
from anywidth.training.distillation import soft_cross_entropy
from anywidth.training.gpu.fast_layers import use_kernels
from anywidth.training.step import SandwichStep, StepResult

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

# ---- data, network, optimiser --------------------------------------------------------------------


def load_data(
    settings: ClassificationSettings, device: torch.device, *, shared: bool = False
) -> ClassificationData:
    """The data of a configuration; `shared` gives each rank its part of every batch."""
    augmentation: Any = Augmentation(settings.flip, settings.crop_padding, cutout=settings.cutout)
    if settings.data not in ("bundled", "fashion_mnist", "cifar10", "cifar100"):
        from anywidth.app.data.folder_images import FolderAugmentation

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
    )


def calibration_images(
    data: ClassificationData, settings: ClassificationSettings, samples: int | None = None
) -> Any:
    """Training images for batch-norm statistics; `samples` of them at random, or all."""
    loader: Any = data.calibration
    if settings.calibration_augmented:
        size = settings.evaluation_batch_size
        loader = data.train.subset(
            data.train.samples, settings.seed, batch_size=size, augmented=True
        )
    if samples is None or samples >= loader.samples:
        return loader
    return loader.subset(samples, seed=settings.seed, augmented=True)


def build_model(
    settings: ClassificationSettings, classes: int, input_shape: tuple[int, int, int]
) -> nn.Module:
    """The converted network of a configuration, with its initial weights."""
    torch.manual_seed(settings.seed)
    options: dict[str, Any] = {"num_classes": classes}
    if ":" not in settings.model:
        options["in_channels"] = input_shape[0]
        if settings.total_stride is not None:
            options["total_stride"] = settings.total_stride
        if settings.strides is not None:
            options["strides"] = settings.strides
    model = load_model(settings.model, **options)
    example = torch.randn(2, *input_shape)
    # Built for its width alone, its initial weights know their own fan-out.
    model, widths = built_alone(model, example, settings, initialize)
    slimmable(model, None, widths, example_input=example, average_outputs=settings.average_outputs)
    if settings.method == "s":
        for width in settings.switches:
            track_statistics(model, width)
        if settings.private_affine:
            add_private_affine(model, settings.switches)
    return to_channels_last(model)


def to_channels_last(model: nn.Module) -> nn.Module:
    """The memory layout that convolutions are fastest in, on a CPU too."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def make_optimizer(model: nn.Module, settings: ClassificationSettings) -> torch.optim.Optimizer:
    """SGD; weight decay on linear weights and on convolutions that are not depthwise.

    The last layer, which is the classifier of most networks, may have a learning rate of its own.
    """
    layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {
        (settings.weight_decay, 1.0): [],
        (0.0, 1.0): [],
    }
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        share = settings.head_rate if layers and module is layers[-1] else 1.0
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:  # tied: it belongs to the first that has it
                continue
            seen.add(parameter)
            is_depthwise = isinstance(module, nn.Conv2d) and 1 < module.groups == module.in_channels
            is_decayed = isinstance(module, _LAYERS) and name == "weight" and not is_depthwise
            decay = settings.weight_decay if is_decayed else 0.0
            groups.setdefault((decay, share), []).append(parameter)
    return torch.optim.SGD(
        [
            {"params": parameters, "weight_decay": decay, RATE_SHARE: share}
            for (decay, share), parameters in groups.items()
            if parameters
        ],
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.momentum > 0,
        fused=all(parameter.is_cuda for parameter in model.parameters()) or None,
    )


def learning_rate(step: int, total: int, warmup: int, highest: float) -> float:
    """Linear to zero over all steps, after a linear rise if there is one."""
    if step < warmup:
        return highest * (step + 1) / warmup
    return highest * (total - step) / max(1, total - warmup)


_PRECISIONS: dict[str, torch.dtype | Literal["auto"] | None] = {
    "auto": "auto",
    "float32": None,
    "bfloat16": torch.bfloat16,
}


# ---- training ------------------------------------------------------------------------------------


def train_run(run: Run, settings: ClassificationSettings) -> bool:
    """Trains until the last epoch, or an interrupt (then false); resumes where the run left off."""
    device = local_device(settings.device)
    data = load_data(settings, device, shared=True)
    model = build_model(settings, len(data.classes), data.input_shape).to(device)
    has_teacher = settings.method == "us" and settings.rule in ("sandwich", "max+random")
    distill = partial(soft_cross_entropy, temperature=settings.temperature)
    step = SandwichStep(
        model,
        make_optimizer(model, settings),
        partial(F.cross_entropy, label_smoothing=settings.label_smoothing),
        distill if settings.distill and has_teacher else None,
        settings.sampling(),
        truth=settings.truth,
        autocast=_PRECISIONS[settings.precision],
        # Configurations that never come again are not worth capturing.
        engine="eager" if settings.nonuniform and settings.lattice is None else "auto",
        kernels=settings.kernels,
    )
    if settings.lattice is not None and settings.method == "us" and device.type == "cuda":
        # No configuration is met for the first time in the middle of training.
        images, labels = next(iter(data.train.epoch(0)))
        step.warm_up(plan_of(model).lattice(settings.lattice)[::-1], images, labels)
    total = settings.epochs * len(data.train)
    warmup = round(settings.warmup_epochs * len(data.train))
    training = Training(
        run,
        step,
        data.train,
        settings.epochs,
        lambda number: learning_rate(number, total, warmup, settings.learning_rate),
        _measure,
        partial(_validate, model, data.validation, settings),
        settings.validate_every,
        settings.log_every,
        settings.checkpoint_every,
    )
    if not train(training):
        return False
    state = {
        "steps": step.count,
        "classes": list(data.classes),
        "input_shape": list(data.input_shape),
        "mean": list(data.mean),
        "std": list(data.std),
    }
    save_final(run, model, state)
    return True


def _measure(result: StepResult, labels: Tensor) -> dict[str, Tensor]:
    """Loss and accuracy on the batch, at the widest and the narrowest width of the step."""
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
    """The widths whose statistics are tracked while training, by the name they are logged under."""
    if settings.method == "i":
        return {"max": settings.width}
    if settings.method == "s":
        return {"max": max(settings.switches), "min": min(settings.switches)}
    ends = {"max": settings.high, "min": settings.low}
    rules = {"random": (), "min+random": ("min",), "max+random": ("max",)}
    return {name: ends[name] for name in rules.get(settings.rule, ("max", "min"))}


def _validate(
    model: nn.Module, loader: Loader, settings: ClassificationSettings
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
def evaluate(model: nn.Module, loader: Loader) -> dict[str, float]:
    """Errors in percent and loss over a loader, at the width the network is set to.

    With several ranks all must call it; each may have its part of the batches, or all of them.
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
    top1, top5, loss, count = sum_over_ranks(totals).tolist()
    return {
        "top1_error": 100 * (1 - top1 / count),
        "top5_error": 100 * (1 - top5 / count),
        "loss": loss / count,
    }


@dataclass(frozen=True)
class TrainedClassifier(Trained):
    """A finished run: its network as trained, with its statistics, and its data if asked for."""

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

    def calibrate(
        self, widths: Sequence[float], samples: int | None = None, method: str | None = None
    ) -> int:
        """Computes statistics for some widths, saves them with the run, and returns over how many.

        With several ranks all must call it: the widths are shared out.
        """
        if samples is None:
            samples = self.settings.calibration_samples
        if samples is not None and samples < 2:
            raise AnywidthError(f"samples={samples}: batch statistics need at least 2")
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

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return evaluate(model, self._loaded().validation)

    def deployment(self) -> Deployment:
        return deployed_classifier(self)

    def examples(self) -> list[Example]:
        return classifier_examples(self)

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
    """Loads a finished run for calibrating, evaluating or predicting.

    A `settings` given stands for the run's own: its data may lie elsewhere by now.
    """
    run = Run.open_finished(folder, writing=rank() == 0)
    settings = settings or run.read_settings(ClassificationSettings)
    place = local_device(device)
    state = run.state()
    channels, height, width = state["input_shape"]
    model = build_model(settings, len(state["classes"]), (channels, height, width))
    load_weights(model, run.model_tensors(), run.folder)
    load_statistics(model, *run.load_part("statistics"))
    model.to(place).eval()
    if place.type == "cuda":
        use_kernels(model, settings.kernels)  # else every new width would cost seconds
    data = load_data(settings, place) if with_data else None
    return TrainedClassifier(run, settings, model, data)


TASK = Task(ClassificationSettings, TrainedClassifier, train_run, open_trained, RECIPES, predict)
