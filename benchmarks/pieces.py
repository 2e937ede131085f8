"""Training several networks in pieces: runs that go on where they were left, side by side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from anywidth.config import Config, to_json
from anywidth.errors import AnywidthError
from anywidth.files import read_json, write_json
from anywidth.run import Run

_PIECES = "pieces.json"

Piece = dict[str, float]
"""Training steps and the seconds they took, with loading, capturing and validating in the time."""


def open_run(folder: Path, config: Config, circumstances: Collection[str] = ()) -> Run:
    """A new run, or the one that is there if it was begun with the same configuration.

    Args:
        folder: of the run.
        config: what to train.
        circumstances: fields that may differ, because they say how to train and not what.
    """
    if not (folder / "config.json").exists():
        return Run.create(folder, config)
    run = Run.open(folder, writing=True)
    wanted = to_json(config)
    changed = {field for field in wanted if run.config_data.get(field) != wanted[field]}
    other = sorted(changed - set(circumstances))
    if other:
        raise AnywidthError(
            f"{folder} was begun with another {', '.join(other)}: repeat its options, or choose "
            "another folder"
        )
    return run


def train_piece(run: Run, train: Callable[[], bool], deadline: float) -> tuple[bool, Piece]:
    """Trains until the end or the deadline; whether it is done, and what was done.

    Args:
        run: that `train` works on.
        train: a task's `train_run`, which saves a checkpoint and returns when asked to stop.
        deadline: by `time.monotonic`.
    """
    nothing = {"steps": 0, "seconds": 0.0}
    if run.finished or time.monotonic() >= deadline:
        return run.finished, nothing
    begun = run.load_checkpoint()
    started = time.monotonic()
    if deadline < float("inf"):
        alarm = threading.Timer(deadline - started, os.kill, (os.getpid(), signal.SIGTERM))
        alarm.daemon = True
        alarm.start()
    try:
        is_done = train()
    finally:
        if deadline < float("inf"):
            alarm.cancel()
    seconds = time.monotonic() - started
    ended = run.load_checkpoint()
    steps = (ended.step if ended else 0) - (begun.step if begun else 0)
    piece = {"steps": steps, "seconds": round(seconds, 1)}
    write_json(run.folder / _PIECES, {"pieces": [*read_pieces(run), piece]})
    return is_done, piece


def read_pieces(run: Run) -> list[Piece]:
    path = run.folder / _PIECES
    return list(read_json(path)["pieces"]) if path.exists() else []


def steps_per_second(pieces: Sequence[Piece]) -> float:
    seconds = sum(piece["seconds"] for piece in pieces)
    return sum(piece["steps"] for piece in pieces) / seconds if seconds else 0.0


def work_in_parallel(module: str, names: Sequence[str], arguments: Sequence[str]) -> None:
    """A process a network with the same options; each prints its own progress.

    Args:
        module: of the benchmark, which takes --only NAME, --no-table and --parallel.
        names: of the networks.
        arguments: that the benchmark was called with.
    """
    command = [sys.executable, "-m", module, *_shared(arguments), "--no-table", "--only"]
    children = {name: subprocess.Popen([*command, name]) for name in names}
    try:
        codes = {name: child.wait() for name, child in children.items()}
    except BaseException:
        for child in children.values():
            child.terminate()
        for child in children.values():
            child.wait()
        raise
    failed = [name for name, code in codes.items() if code]
    if failed:
        raise AnywidthError(f"{', '.join(failed)} ended with an error; see the lines above")


def _shared(arguments: Sequence[str]) -> list[str]:
    """What all processes are given: not which networks, as each has one of its own."""
    rest, kept = list(arguments), []
    while rest:
        argument = rest.pop(0)
        if argument == "--only":
            rest.pop(0)
        elif argument != "--parallel" and not argument.startswith("--only="):
            kept.append(argument)
    return kept


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"
