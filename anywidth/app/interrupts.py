"""Ctrl-C and SIGTERM: they end a command with one line, and an exit code that tells them apart."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_last: int = signal.SIGINT


def note_signal(number: int) -> None:
    """Remember the signal because of which the command ends."""
    global _last
    _last = number


def exit_code() -> int:
    """The exit code of a command that was stopped: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + _last


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Both signals raise KeyboardInterrupt; while something is imported they end the process.

    Some packages import others under a bare `except:`, which would swallow the interrupt, and the
    command would go on.
    """
    note_signal(signal.SIGINT)
    # `nohup` and shells' background jobs ignore Ctrl-C, and so does this.
    caught = [one for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
    with handled_by(_stop, caught):
        yield


@contextlib.contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """Handle signals inside a `with` block; afterwards they have their old handlers.

    Only the main thread may handle signals; in others, this does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old or signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    note_signal(number)
    if _is_importing(frame):
        with contextlib.suppress(Exception):  # it may be written to at this moment
            sys.stdout.flush()
        os.write(2, b"Stopped.\n")
        os._exit(exit_code())
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
