"""Training in pieces: a run continues where it stopped, and records the time of each piece."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anywidth.app.runs.run import Run
from anywidth.app.studies.provenance import provenance
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.distributed import local_device
from anywidth.errors import AnywidthError
from anywidth.files import read_json, write_json

_PIECES = "pieces.json"

Piece = dict[str, Any]
"""Steps, seconds (including loading, capturing and validating), provenance.

A killed piece has 0 steps and seconds, and is marked `killed`.
"""


def train_piece(run: Run, settings: TaskSettings, train_run: Callable[[Run, Any], bool]) -> bool:
    """Train until the end or a signal, and record the piece; returns whether the run is done.

    `train_run` of a task saves a checkpoint and returns false when it is stopped.
    """
    if run.finished:
        return True
    begun = run.load_checkpoint()
    before, made_by = read_pieces(run.folder), provenance(local_device(settings.device))
    killed = {"steps": 0, "seconds": 0.0, "killed": True, **made_by}
    write_json(run.folder / _PIECES, {"pieces": [*before, killed]})  # stays if this is killed
    started = time.monotonic()
    is_done = train_run(run, settings)
    seconds = time.monotonic() - started
    ended = run.load_checkpoint()
    steps = (ended.step if ended else 0) - (begun.step if begun else 0)
    piece = {"steps": steps, "seconds": round(seconds, 1), **made_by}
    write_json(run.folder / _PIECES, {"pieces": [*before, piece]})
    return is_done


@contextlib.contextmanager
def terminated_at(deadline: float | None) -> Iterator[None]:
    """Send SIGTERM to this process at the deadline, which stops the training loop."""
    if deadline is None:
        yield
        return
    wait = max(0.0, deadline - time.time())
    alarm = threading.Timer(wait, os.kill, (os.getpid(), signal.SIGTERM))
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def read_pieces(folder: Path) -> list[Piece]:
    """The pieces of a run: steps, seconds, versions and device."""
    path = folder / _PIECES
    if not path.exists():
        return []
    cure = f"remove the file, or {folder} to train again"
    try:
        pieces = read_json(path).get("pieces")
    except AnywidthError as error:
        raise AnywidthError(f"{error}; {cure}") from error
    if not isinstance(pieces, list) or not all(map(_is_piece, pieces)):
        raise AnywidthError(f"{path}: damaged, it has no steps and seconds; {cure}")
    return pieces


def _is_piece(found: object) -> bool:
    return isinstance(found, dict) and all(
        isinstance(found.get(name), int | float) for name in ("steps", "seconds")
    )
