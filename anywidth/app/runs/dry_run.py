"""A dry run: a training is prepared as always, a few steps are measured, and nothing is written."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anywidth.app.runs.checkpoints import Checkpoint
from anywidth.app.runs.run import Run, check_free
from anywidth.app.runs.settings import Settings, to_json
from anywidth.distributed import device_name
from anywidth.measuring.progress import training_progress

if TYPE_CHECKING:
    from anywidth.app.runs.loop import Training

_WARM_UP, _FEWEST, _MOST = 2, 3, 20
# Steps are measured for about so many seconds.
_SECONDS = 5.0


@dataclass(frozen=True)
class Forecast:
    """What a training takes, from a few measured steps.

    `seconds_per_step` is their median, with the loading of their data; `seconds` is for all steps;
    `memory` is in bytes at the peak, None if the system does not tell.
    """

    epochs: int
    steps: int
    batch_size: int
    seconds_per_step: float
    measured: int
    seconds: float
    memory: int | None
    device: str

    def __str__(self) -> str:
        per_epoch, seconds = self.steps // self.epochs, self.seconds_per_step
        each = f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
        lines = [
            f"steps    {self.steps:,}: {self.epochs:,} epochs of {per_epoch:,} steps, batch size "
            f"{self.batch_size:,}",
            f"time     about {timedelta(seconds=max(1, round(self.seconds)))} for the steps, "
            f"{each} each (median of {self.measured}); validation, calibration and the spectrum "
            "come on top",
        ]
        if self.memory is not None:
            lines.append(f"memory   {self.memory / 2**30:.2f} GiB at the peak")
        return "\n".join([*lines, f"device   {self.device}"])


class DryRun(Run):
    """A run without a folder: training it measures a few steps instead."""

    is_kept = False

    def __init__(self, folder: Path, settings: Settings) -> None:
        settings.check()
        check_free(folder)
        super().__init__(folder, to_json(settings), writing=False)
        self.forecast: Forecast | None = None

    def keep_data(self, facts: Mapping[str, Any]) -> None:
        """There is no folder to keep them in."""

    def load_checkpoint(self) -> Checkpoint | None:
        return None


def measure_steps(training: Training) -> Forecast:
    """Run the first steps of a training, and extrapolate."""
    device = next(training.step.model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.monotonic()
    batches = training.loader.epoch(0)
    first = next(batches)
    preparing = time.monotonic() - began
    times: list[float] = []
    few = min(_MOST, len(training.loader))
    with training_progress(few, description="measuring") as progress:
        for inputs, targets in itertools.islice(itertools.chain([first], batches), few):
            training.step(inputs, targets)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.monotonic())
            progress.update(len(times))
            if len(times) >= _WARM_UP + _FEWEST and times[-1] - began > _SECONDS:
                break
    steps = [after - before for before, after in itertools.pairwise(times)][_WARM_UP - 1 :]
    each = statistics.median(steps) if steps else times[-1] - began - preparing
    # A roll-out is played before every epoch; images are loaded while others are trained on.
    starts = 1 if training.counts_images else training.epochs
    return Forecast(
        epochs=training.epochs,
        steps=training.total_steps,
        batch_size=training.loader.batch_size,
        seconds_per_step=each,
        measured=max(1, len(steps)),
        seconds=starts * preparing + training.total_steps * each,
        memory=_peak_memory(device),
        device=device_name(device),
    )


def _peak_memory(device: torch.device) -> int | None:
    """The peak in bytes: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
