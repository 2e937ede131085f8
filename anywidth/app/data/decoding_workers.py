"""Batches from worker processes; a stopped worker causes an error instead of an endless wait."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from anywidth.errors import AnywidthError

SECONDS = 60.0
"""How long a worker may be stopped; Ctrl-Z stops this process too, so it does not count."""
_LOOKS = 10
_ENDING_SECONDS = 2.0
_MOST_WORKERS = 16


def available_cores() -> int:
    """The cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def default_workers() -> int:
    """One worker per core, shared among the ranks of this machine."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    return max(1, min(_MOST_WORKERS, available_cores() // ranks))


def watched(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader whose workers are kept between epochs."""
    with watching(loader) as batches:
        yield from batches


@contextlib.contextmanager
def watching(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """An epoch of such a loader. Its batches may be read in another thread.

    An error that a stopped or killed worker causes within the context says so.
    """
    if loader.num_workers == 0:
        yield iter(loader)
        return
    # The first time, workers are forked, which is safer before there is another thread.
    batches = iter(loader) if loader._iterator is None else None
    killed: list[int] = []
    is_over = threading.Event()
    watch = threading.Thread(target=_kill_stopped, args=(loader, killed, is_over), daemon=True)
    watch.start()
    try:
        yield iter(loader) if batches is None else batches
    except (RuntimeError, OSError, EOFError) as error:  # a killed worker causes any of them
        if killed:
            raise AnywidthError(
                f"process {killed[0]}, which decodes images, was stopped (SIGSTOP) for "
                f"{SECONDS:g} seconds: continue the run with --resume, or decode in this process "
                "with --workers 0"
            ) from error
        ended = None if isinstance(error, RuntimeError) else _ended_worker(loader)
        if ended is None:
            raise
        raise RuntimeError(f"DataLoader worker (pid {ended}) exited unexpectedly") from error
    finally:
        is_over.set()
        watch.join()


def _kill_stopped(loader: DataLoader[Any], killed: list[int], is_over: threading.Event) -> None:
    """Kill workers that stay stopped, because their batch would never arrive."""
    seen: dict[int, int] = {}
    while not is_over.wait(SECONDS / _LOOKS):
        stopped = [worker.pid for worker in _workers(loader) if _is_stopped(worker.pid)]
        seen = {pid: seen.get(pid, 0) + 1 for pid in stopped}
        for pid, times in seen.items():
            if times >= _LOOKS:
                killed.append(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _ended_worker(loader: DataLoader[Any]) -> int | None:
    """A worker that has ended, or is about to: its sockets close before the process is gone."""
    deadline = time.monotonic() + _ENDING_SECONDS
    for worker in _workers(loader):
        worker.join(max(0.0, deadline - time.monotonic()))
        if not worker.is_alive():
            return int(worker.pid)
    return None


def _workers(loader: DataLoader[Any]) -> Sequence[Any]:
    return getattr(loader._iterator, "_workers", ())


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped; false if the system does not tell (all but Linux)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")
