"""Image classification: one network trained for all widths, and its baselines.

The same code trains a universally slimmable network (US-Net), a slimmable one with a few switches
(S-Net) and an individually trained one (I-Net), by `ClassificationSettings.method`.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from anywidth.app.data.order import ImageLoader
from anywidth.app.runs.loop import RATE_SHARE, Training, save_final, scheduled_rate, train
from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.command import predict
from anywidth.app.tasks.classification.networks import build_model, check_logits
from anywidth.app.tasks.classification.recipes import RECIPES
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.app.tasks.classification.trained import (
    TrainedClassifier,
    calibration_images,
    evaluate,
    load_data,
)
from anywidth.app.tasks.registry import Task
from anywidth.app.tasks.starting_network import start_with_weights
from anywidth.distributed import barrier, local_device, rank, world_size
from anywidth.errors import AnywidthError
from anywidth.slimming.convert import at_width, plan_of
from anywidth.training.step import SandwichStep, StepResult

_PRECISIONS: dict[str, torch.dtype | Literal["auto"] | None] = {
    "auto": "auto",
    "float32": None,
    "bfloat16": torch.bfloat16,
}
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


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
    clip = None
    if settings.gradient_clip is not None:
        clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), settings.gradient_clip)
    return SandwichStep(
        model,
        make_optimizer(model, settings),
        settings.loss(),
        settings.distillation(),
        settings.sampling(),
        truth=settings.truth,
        **settings.step_options(),
        autocast=_PRECISIONS[settings.precision],
        # Configurations that are never drawn again are not worth capturing.
        engine="eager" if settings.nonuniform and settings.lattice is None else "auto",
        kernels=settings.kernels,
        after_backward=clip,
    )


def make_optimizer(model: nn.Module, settings: ClassificationSettings) -> torch.optim.Optimizer:
    """SGD; weight decay on linear weights and on convolutions that are not depthwise.

    The last layer, the classifier of most networks, may have its own learning rate.
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
            if parameter in seen:  # tied: it belongs to the first module that has it
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


TASK = Task(ClassificationSettings, TrainedClassifier, train_run, RECIPES, predict)
open_trained = TASK.open
