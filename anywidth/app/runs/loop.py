"""The loop around the training step: schedule, log, checkpoint, resume."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from anywidth.app.interrupts import handled_by, note_signal
from anywidth.app.runs.checkpoints import part_file
from anywidth.app.runs.dry_run import DryRun, measure_steps
from anywidth.app.runs.metrics import MetricsLog, WandbLog
from anywidth.app.runs.run import MEND, Run
from anywidth.app.runs.training_state import (
    capture_random_state,
    flatten_state,
    restore_random_state,
    unflatten_state,
)
from anywidth.distributed import barrier, rank, sum_over_ranks, world_size
from anywidth.errors import AnywidthError, errors_about, few_of, misfits
from anywidth.measuring.progress import training_progress
from anywidth.training.calibration import average_statistics
from anywidth.training.statistics_state import load_statistics, statistics_to_tensors
from anywidth.training.step import SandwichStep, StepResult

RATE_SHARE = "rate_share"
"""Key in an optimizer's parameter group: factor of the scheduled learning rate."""


class EpochLoader(Protocol):
    """Training data that can resume in the middle of any epoch."""

    @property
    def batch_size(self) -> int: ...

    def __len__(self) -> int: ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]: ...


@dataclass
class Training:
    """The inputs of the loop, made by a task.

    `measure` returns values to log, on the device; they are read every `log_every` steps.
    `validate` returns values to log after every `validate_every` epochs.
    """

    run: Run  # opened for writing on rank 0
    step: SandwichStep
    loader: EpochLoader
    epochs: int
    learning_rate: Callable[[int], float]  # by step
    measure: Callable[[StepResult, Any], dict[str, Tensor]]
    validate: Callable[[], dict[str, float]]
    validate_every: int = 1
    log_every: int = 20
    checkpoint_every: int = 200
    description: str = "training"
    counts_images: bool = True  # shows images per second instead of steps

    @property
    def total_steps(self) -> int:
        return self.epochs * len(self.loader)


def train(training: Training) -> bool:
    """Train from the newest checkpoint, or from the start; false if it was interrupted.

    A dry run measures a few steps instead, and returns false.

    A loss or weight that is not finite raises an error. It is checked where the loop waits for the
    device anyway (every `log_every` steps, and before a checkpoint is written), so that no
    checkpoint contains one.

    An interrupt (Ctrl-C, SIGTERM) finishes the current step, saves a checkpoint and returns. A run
    that is killed and resumed ends with the same weights as an unbroken run, bit for bit on a CPU,
    except in reinforcement learning, where the games start again.
    """
    for name in ("validate_every", "log_every", "checkpoint_every"):
        if getattr(training, name) < 1:
            raise AnywidthError(f"{name}={getattr(training, name)}: expected at least 1")
    step, per_epoch = training.step, len(training.loader)
    if per_epoch == 0:
        raise AnywidthError(
            f"no training batch: the batch size of {training.loader.batch_size} is larger than "
            "the training set; choose a smaller --batch-size"
        )
    if isinstance(training.run, DryRun):
        training.run.forecast = measure_steps(training)
        return False
    saved = step.count = load_checkpoint(training.run, step)
    with contextlib.ExitStack() as stack:
        interrupted = stack.enter_context(_interrupts())
        log = None
        if rank() == 0:
            folder = training.run.tensorboard_folder
            log = stack.enter_context(MetricsLog(training.run.metrics_path, folder))
            log.truncate_after(step.count)
            if training.run.uses_wandb:
                beside = WandbLog(training.run.folder, training.run.settings_data)
                stack.callback(beside.close)
                log.beside = beside.append
        progress = stack.enter_context(
            training_progress(
                training.total_steps,
                step.count,
                description=training.description,
                images_per_step=training.loader.batch_size if training.counts_images else None,
            )
        )
        while step.count < training.total_steps:
            epoch, start = divmod(step.count, per_epoch)
            for inputs, targets in training.loader.epoch(epoch, start):
                rate = training.learning_rate(step.count)
                for group in step.optimizer.param_groups:
                    group["lr"] = rate * group.get(RATE_SHARE, 1.0)
                result = step(inputs, targets)
                values = _values(training, result, targets, saved)
                shown = {name: value for name, value in values.items() if "rate" not in name}
                progress.update(step.count, epoch=f"{epoch + 1}/{training.epochs}", **shown)
                if values and log is not None:
                    log.append(step.count, {"epoch": epoch + 1, **values})
                stops = _any_rank(interrupted, step.count % training.log_every == 0)
                if stops or step.count % training.checkpoint_every == 0:
                    _check_weights(training, saved)
                    save_checkpoint(training.run, step)
                    saved = step.count
                if stops:
                    return False
    _check_weights(training, saved)
    save_checkpoint(training.run, step)
    return True


def _values(training: Training, result: StepResult, targets: Any, saved: int) -> dict[str, float]:
    """Values to log for the last step, and for an epoch that ends with it; often none."""
    step = training.step
    values: dict[str, float] = {}
    if step.count % training.log_every == 0 or step.count == training.total_steps:
        loss = float(sum_over_ranks(torch.stack(result.losses).sum()))
        if not math.isfinite(loss):
            raise _diverged(training, f"the loss is {loss}", saved)
        # Reading them is the only place where the loop waits for the device.
        values = {name: float(value) for name, value in training.measure(result, targets).items()}
        values["learning_rate"] = training.learning_rate(step.count - 1)
    epoch, begun = divmod(step.count, len(training.loader))
    is_due = epoch % training.validate_every == 0 or epoch == training.epochs
    if begun == 0 and is_due:
        average_statistics(step.model)
        values |= training.validate()
    return values


def save_checkpoint(run: Run, step: SandwichStep) -> None:
    """Write everything a resumed run needs; only on rank 0."""
    if rank() == 0:
        optimizer, optimizer_structure = flatten_state(step.optimizer.state_dict())
        random, random_structure = capture_random_state()
        statistics, metadata = statistics_to_tensors(step.model)
        model = step.model.state_dict()
        tensors = {"model": model, "statistics": statistics, "optimizer": optimizer}
        average = {} if step.ema is None else {"ema": step.ema.state_dict()}
        run.save_checkpoint(
            step.count,
            {**tensors, "random": random, **average},
            {"optimizer": optimizer_structure, "random": random_structure},
            metadata={"statistics": metadata},
        )
    barrier()


def save_final(run: Run, model: nn.Module, state: dict[str, Any]) -> None:
    """Write the trained network and the data to build it again; only on rank 0."""
    if rank() == 0:
        statistics, metadata = statistics_to_tensors(model)
        tensors = {"model": model.state_dict(), "statistics": statistics}
        run.save_final(tensors, state, metadata={"statistics": metadata})
    barrier()


def load_checkpoint(run: Run, step: SandwichStep) -> int:
    """Restore a step from the newest checkpoint; returns the number of steps done."""
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        return 0
    try:
        load_weights(step.model, checkpoint.tensors["model"], run.folder)
        load_statistics(
            step.model, checkpoint.tensors["statistics"], checkpoint.metadata["statistics"]
        )
        if step.ema is not None:
            step.ema.load_state_dict(checkpoint.tensors.get("ema", {}))
        step.optimizer.load_state_dict(
            unflatten_state(checkpoint.tensors["optimizer"], checkpoint.state["optimizer"])
        )
        restore_random_state(checkpoint.tensors["random"], checkpoint.state["random"])
    except Exception as error:  # each part raises its own kinds
        if str(run.folder) in str(error):
            raise
        raise AnywidthError(
            f"{run.folder}: its checkpoint of step {checkpoint.step} does not belong to this run "
            f"({error or type(error).__name__}); remove that checkpoint, or start a new run"
        ) from error
    return checkpoint.step


def load_final(model: nn.Module, run: Run) -> None:
    """Load the weights and statistics of a finished run; they must be numbers."""
    load_weights(model, run.model_tensors(), run.folder)
    path = run.folder / part_file("statistics")
    tensors, metadata = run.load_part("statistics")
    _check_finite(tensors, path)
    with errors_about(path, MEND):
        load_statistics(model, tensors, metadata)


def load_weights(model: nn.Module, tensors: dict[str, Tensor], run: Path) -> None:
    """Load the weights of a run; the error says how they do not fit."""
    own = model.state_dict()
    other_types = [n for n, tensor in tensors.items() if n in own and own[n].dtype != tensor.dtype]
    wrong = misfits(tensors, own)
    if other_types:
        wrong = wrong or f"of another type: {few_of(other_types)}"
    if wrong:
        raise AnywidthError(
            f"{run}: its weights do not fit the {type(model).__name__} of its config.json "
            f"({wrong}); were files of another run copied into it?"
        )
    _check_finite(tensors, run)
    model.load_state_dict(tensors)


def _check_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse numbers with which every answer would be NaN."""
    for name, tensor in tensors.items():
        is_bad = tensor.is_floating_point() and not tensor.isfinite().all()
        if is_bad or (name.endswith("running_var") and bool((tensor < 0).any())):
            what = "NaN or infinite" if is_bad else "negative variances"
            raise AnywidthError(f"{path}: {name} has values that are {what}; {MEND}")


def scheduled_rate(
    step: int,
    total: int,
    warmup: int,
    highest: float,
    schedule: Literal["linear", "cosine"] = "linear",
) -> float:
    """Falls to zero over all steps, by a line or half a cosine, after a linear warm-up."""
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    if schedule == "cosine":
        return highest * 0.5 * (1 + math.cos(math.pi * done))
    return highest * (total - step) / max(1, total - warmup)


def _check_weights(training: Training, saved: int) -> None:
    """Raise if a weight is not finite; all ranks have the same weights."""
    for name, parameter in training.step.model.named_parameters():
        if not parameter.isfinite().all():
            raise _diverged(training, f"{name} is not finite", saved)


def _diverged(training: Training, what: str, saved: int) -> AnywidthError:
    done = training.step.count
    kept = f"; {training.run.folder} keeps the checkpoint of step {saved}" if saved else ""
    return AnywidthError(
        f"training diverged: at step {done} {what}, with a learning rate of "
        f"{training.learning_rate(done - 1):g}; start a new run with a lower --learning-rate, or "
        f"with a longer warm-up{kept}"
    )


def _any_rank(interrupted: threading.Event, may_wait: bool) -> bool:
    """Whether to stop: an interrupt of one rank must stop all ranks after the same step.

    Ranks must wait for each other to agree, so they only do this where values are read anyway.
    """
    if world_size() == 1:
        return interrupted.is_set()
    if not may_wait:
        return False
    flag = torch.tensor(float(interrupted.is_set()))
    if torch.distributed.get_backend() == "nccl":
        flag = flag.cuda()
    return bool(sum_over_ranks(flag).item())


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; a second Ctrl-C stops immediately."""
    event = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        note_signal(number)
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    with handled_by(handle):
        yield event
