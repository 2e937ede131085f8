"""The loop around the training step: schedule, log, checkpoint, resume."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from anywidth.app.runs.metrics import MetricsLog
from anywidth.app.runs.random_state import capture_random_state, restore_random_state
from anywidth.app.runs.run import Run
from anywidth.distributed import barrier, rank, sum_over_ranks, world_size
from anywidth.errors import AnywidthError, few_of
from anywidth.files import flatten_state, unflatten_state
from anywidth.measuring.progress import training_progress
from anywidth.training.calibration import average_statistics, load_statistics, statistics_to_tensors
from anywidth.training.step import SandwichStep, StepResult

RATE_SHARE = "rate_share"
"""In an optimiser's group of parameters: the share of the schedule's learning rate they get."""


class EpochLoader(Protocol):
    """Training data that can be begun again in the middle of any epoch."""

    @property
    def batch_size(self) -> int: ...

    def __len__(self) -> int: ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]: ...


@dataclass
class Training:
    """Everything the loop needs; a task puts it together.

    Args:
        run: where checkpoints and metrics go; opened for writing on rank 0.
        step: the training step, with its model and optimiser.
        loader: the training data.
        epochs: how many passes over it.
        learning_rate: step number → learning rate.
        measure: what to log of a step, still on the device; read every `log_every` steps.
        validate: what to log after each `validate_every` epochs.
        counts_images: show images a second; otherwise steps.
    """

    run: Run
    step: SandwichStep
    loader: EpochLoader
    epochs: int
    learning_rate: Callable[[int], float]
    measure: Callable[[StepResult, Any], dict[str, Tensor]]
    validate: Callable[[], dict[str, float]]
    validate_every: int = 1
    log_every: int = 20
    checkpoint_every: int = 200
    description: str = "training"
    counts_images: bool = True

    @property
    def total_steps(self) -> int:
        return self.epochs * len(self.loader)


def train(training: Training) -> bool:
    """Trains from the newest checkpoint, or from the start; false if it was interrupted.

    A loss or weights that are no longer finite end it with an error; they are looked at where the
    loop waits for the device anyway (every `log_every` steps, and before a checkpoint is written),
    so that no checkpoint holds them.

    An interrupt (Ctrl-C, SIGTERM) lets the present step end, saves a checkpoint and returns. A run
    that is killed and resumed ends in the same weights as one that was not, bit for bit on a CPU;
    except in reinforcement learning, where the games begin anew.
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
    saved = step.count = load_checkpoint(training.run, step)
    with contextlib.ExitStack() as stack:
        interrupted = stack.enter_context(_interrupts())
        log = None
        if rank() == 0:
            folder = training.run.tensorboard_folder
            log = stack.enter_context(MetricsLog(training.run.metrics_path, folder))
            log.truncate_after(step.count)
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
                _set_learning_rate(step.optimizer, training.learning_rate(step.count))
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
    """What to log of the step just done, and of an epoch that ends with it; often nothing."""
    step = training.step
    values: dict[str, float] = {}
    if step.count % training.log_every == 0 or step.count == training.total_steps:
        loss = float(sum_over_ranks(torch.stack(result.losses).sum()))
        if not math.isfinite(loss):
            raise _diverged(training, f"the loss is {loss}", saved)
        values = _read(training.measure(result, targets))
        values["learning_rate"] = training.learning_rate(step.count - 1)
    epoch, begun = divmod(step.count, len(training.loader))
    if begun == 0 and _is_due(training, epoch):
        average_statistics(step.model)
        values |= training.validate()
    return values


def save_checkpoint(run: Run, step: SandwichStep) -> None:
    """Writes everything a resumed run needs; on rank 0 alone."""
    if rank() == 0:
        optimizer, optimizer_structure = flatten_state(step.optimizer.state_dict())
        random, random_structure = capture_random_state()
        statistics, statistics_metadata = statistics_to_tensors(step.model)
        run.save_checkpoint(
            step.count,
            {
                "model": step.model.state_dict(),
                "statistics": statistics,
                "optimizer": optimizer,
                "random": random,
            },
            {
                "optimizer": optimizer_structure,
                "random": random_structure,
            },
            metadata={"statistics": statistics_metadata},
        )
    barrier()


def save_final(run: Run, model: nn.Module, state: dict[str, Any]) -> None:
    """Writes the trained network and what is needed to build it again; on rank 0 alone."""
    if rank() == 0:
        statistics, metadata = statistics_to_tensors(model)
        run.save_final(
            {"model": model.state_dict(), "statistics": statistics},
            state,
            metadata={"statistics": metadata},
        )
    barrier()


def load_checkpoint(run: Run, step: SandwichStep) -> int:
    """Puts a step back to the run's newest checkpoint; returns the number of steps done."""
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        return 0
    load_weights(step.model, checkpoint.tensors["model"], run.folder)
    load_statistics(step.model, checkpoint.tensors["statistics"], checkpoint.metadata["statistics"])
    step.optimizer.load_state_dict(
        unflatten_state(checkpoint.tensors["optimizer"], checkpoint.state["optimizer"])
    )
    restore_random_state(checkpoint.tensors["random"], checkpoint.state["random"])
    return checkpoint.step


def load_weights(model: nn.Module, tensors: dict[str, Tensor], run: Path) -> None:
    """Gives a network the weights of a run, or says in what they are another's."""
    own = model.state_dict()
    reshaped = [name for name in own if name in tensors and own[name].shape != tensors[name].shape]
    found = {
        "lacking": [name for name in own if name not in tensors],
        "unknown": [name for name in tensors if name not in own],
        "of other shape": reshaped,
    }
    if any(found.values()):
        named = "; ".join(f"{what}: {few_of(names)}" for what, names in found.items() if names)
        raise AnywidthError(
            f"{run}: its weights are not of {type(model).__name__} as its config.json has it "
            f"({named}); were files of another run copied into it?"
        )
    model.load_state_dict(tensors)


def _read(values: dict[str, Tensor]) -> dict[str, float]:
    """Reads device values back: the one place where the loop waits for the device."""
    return {name: float(value) for name, value in values.items()}


def _is_due(training: Training, epoch: int) -> bool:
    return epoch % training.validate_every == 0 or epoch == training.epochs


def _set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_SHARE, 1.0)


def _check_weights(training: Training, saved: int) -> None:
    """All ranks have the same weights, and so find the same."""
    for name, parameter in training.step.model.named_parameters():
        if not parameter.isfinite().all():
            raise _diverged(training, f"{name} is not finite", saved)


def _diverged(training: Training, what: str, saved: int) -> AnywidthError:
    done = training.step.count
    kept = f"; {training.run.folder} keeps the checkpoint of step {saved}" if saved else ""
    return AnywidthError(
        f"training has diverged: at step {done} {what}, with a learning rate of "
        f"{training.learning_rate(done - 1):g}; start a new run with a lower --learning-rate, or "
        f"with a longer warm-up{kept}"
    )


def _any_rank(interrupted: threading.Event, may_wait: bool) -> bool:
    """With several ranks, an interrupt of one must stop all after the same step.

    To agree, ranks wait for each other, and so they do only where values are read anyway.
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
    """An event that Ctrl-C and SIGTERM set; a second Ctrl-C stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
