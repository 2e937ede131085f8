"""A line every few seconds of long work, so that nobody wonders whether it hangs.

Whatever is under way is on a stack, and the innermost speaks if nothing was shown for a while:
a progress bar redraws itself, lines of progress are printed again, other work gives its name.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic, sleep

SILENCE = 3.5
"""The longest silence in seconds."""
_TICK = 0.25

_under_way: list[Callable[[], None]] = []
_last_shown = 0.0
_is_watching = False
_lock = threading.Lock()


@contextlib.contextmanager
def speaking(tell: Callable[[], None]) -> Iterator[None]:
    """While the block runs, call `tell` after every silence, from another thread."""
    global _last_shown, _is_watching
    with _lock:
        if not _under_way:
            _last_shown = monotonic()
        _under_way.append(tell)
        if not _is_watching:
            _is_watching = True
            threading.Thread(target=_watch, daemon=True, name="anywidth-heartbeat").start()
    try:
        yield
    finally:
        with _lock:
            if tell in _under_way:
                _under_way.remove(tell)


def shown() -> None:
    """Note that something was just shown."""
    global _last_shown
    _last_shown = monotonic()


@contextlib.contextmanager
def working(description: str, *, shown: bool = True) -> Iterator[None]:
    """Name the work of this block on standard error, with its duration, if it takes long."""
    began, file = monotonic(), sys.stderr  # a converter may be made quiet while it runs

    def tell() -> None:
        took = timedelta(seconds=round(monotonic() - began))
        # A folder's name may have a line break.
        print(f"{' '.join(description.split())} ({took})", file=file, flush=True)

    is_first_rank = os.environ.get("RANK", "0") == "0"
    with speaking(tell if shown and is_first_rank else nothing()):
        yield


def nothing() -> Callable[[], None]:
    """Says nothing: for work that shows itself, or waits for the user."""
    return lambda: None


def _watch() -> None:
    global _is_watching
    while True:
        sleep(_TICK)
        with _lock:
            if not _under_way:
                _is_watching = False
                return
            if monotonic() - _last_shown >= SILENCE:
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    _under_way[-1]()
                shown()


def _start_again() -> None:
    """A forked process has no watcher, and perhaps a lock that nobody will release."""
    global _lock, _is_watching
    _lock, _is_watching = threading.Lock(), False
    _under_way.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_again)
