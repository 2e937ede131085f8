"""Progress of long work: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import operator
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import TypeVar

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from anywidth.distributed import rank
from anywidth.errors import AnywidthError
from anywidth.measuring.heartbeat import nothing, shown, speaking

Item = TypeVar("Item")

_SECONDS_BETWEEN_LINES = 5
_UPDATES_IN_THE_PACE = 100
_CENTURY = 100 * 365 * 86_400.0


@dataclass
class TrainingProgress:
    """Returned by `training_progress`; this class counts and shows nothing (ranks above 0)."""

    description: str
    total: int | None
    step: int
    images_per_step: int | None
    console: Console

    def __post_init__(self) -> None:
        self._fields: dict[str, str] = {}
        self._started = monotonic()
        self._recent = deque([(self._started, self.step)], maxlen=_UPDATES_IN_THE_PACE)

    def update(self, step: int, /, **fields: str | int | float) -> None:
        """Report that `step` steps are done. A field keeps its value until it is given again."""
        self.step = step
        # A new dict, because the bar draws the old one in a thread of its own.
        new = {name: _format(name, value) for name, value in fields.items()}
        self._fields = {**self._fields, **new}
        self._recent.append((monotonic(), step))
        self._show()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """While the work runs."""
        yield

    def _show(self) -> None:
        """After every update."""

    def _pairs(self) -> list[str]:
        return [f"{name} {value}" for name, value in self._fields.items()]

    def _times(self) -> str:
        """The pace of late, the time so far, and the time that is left if that is known."""
        (first, from_step), (last, to_step) = self._recent[0], self._recent[-1]
        rate = (to_step - from_step) / (last - first) if last > first else 0.0
        pace = f"{rate:,.2f} steps/s"
        if self.images_per_step is not None:
            pace = f"{rate * self.images_per_step:,.0f} images/s"
        shown = f"{pace}  {_clock(monotonic() - self._started)} elapsed"
        if self.total is None or rate <= 0:
            return shown
        return f"{shown}  {_clock((self.total - self.step) / rate)} left"


class _Lines(TrainingProgress):
    """A line at every tenth of the work and every few seconds, even if no step ends, for logs."""

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._line_time, self._line_step = monotonic(), self.step
        self._file = self.console.file  # now, because a converter may be made quiet while it runs
        try:
            with speaking(self._print):
                yield
        finally:
            if self.step != self._line_step:
                self._print()

    def _show(self) -> None:
        waited = monotonic() - self._line_time >= _SECONDS_BETWEEN_LINES
        if waited or self._tenths(self.step) > self._tenths(self._line_step):
            self._print()

    def _tenths(self, step: int) -> int:
        return step * 10 // self.total if self.total else 0

    def _print(self) -> None:
        shown()
        self._line_time, self._line_step = monotonic(), self.step
        done = f"{self.description} {self.step}"
        if self.total:
            done += f"/{self.total} ({self.step / self.total:.0%})"
        print("  ".join([done, *self._pairs(), self._times()]), file=self._file, flush=True)


class _Bar(TrainingProgress):
    """A bar that redraws itself, with the fields on a line below: both fit into 80 columns."""

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[times]}", markup=False),
            auto_refresh=False,
            console=self.console,
        )
        self._task = self._progress.add_task(self.description, total=self.total, times="")
        live = Live(
            console=self.console,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),  # a pipe stays a pipe
            get_renderable=self._render,
        )
        with live, speaking(nothing()):
            yield

    def _render(self) -> Group:
        self._progress.update(self._task, completed=self.step, times=self._times())
        below = Columns([Text(pair) for pair in self._pairs()], padding=(0, 2))
        return Group(self._progress.get_renderable(), Padding(below, (0, 0, 0, 2)))


@contextmanager
def training_progress(
    total_steps: int | None,
    start: int = 0,
    *,
    description: str = "training",
    images_per_step: int | None = None,
    console: Console | None = None,
) -> Iterator[TrainingProgress]:
    """Show progress while the block runs, on standard error and only on rank 0.

        with training_progress(steps, start, images_per_step=256) as progress:
            progress.update(step, epoch=3, loss=0.61, accuracy=0.83)

    `total_steps` may be unknown; a resumed run has done `start` of them before. With
    `images_per_step` the pace is in images per second.
    """
    console = console or Console(stderr=True)
    kind = TrainingProgress
    if rank() == 0 and os.environ.get("RANK", "0") == "0":
        # With FORCE_COLOR rich takes a pipe for a terminal.
        is_terminal = console.is_interactive and console.file.isatty()
        kind = _Bar if is_terminal or console.is_jupyter else _Lines
    progress = kind(description, total_steps, start, images_per_step, console)
    with progress._running():
        yield progress


def tracked(
    iterable: Iterable[Item], description: str, *, console: Console | None = None
) -> Iterator[Item]:
    """Iterate over `iterable` and show the progress, relative to its length if it has one."""
    length = operator.length_hint(iterable, -1)
    total = length if length >= 0 else None
    with training_progress(total, description=description, console=console) as progress:
        for done, item in enumerate(iterable, start=1):
            yield item
            progress.update(done)


def _clock(seconds: float) -> str:
    if not seconds < _CENTURY:
        return "over 100 years"
    return str(timedelta(seconds=max(0, round(seconds))))


def _format(name: str, value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, str | int):
        return str(value)
    raise AnywidthError(
        f"progress field {name!r} is a {type(value).__name__}; pass text or a Python number, such "
        "as tensor.item()"
    )
