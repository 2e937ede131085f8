"""Ctrl-C with several ranks: all of them must stop at the same question."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from anywidth.distributed import world_size


@contextlib.contextmanager
def stops_together() -> Iterator[Callable[[], bool]]:
    """A function that says whether this rank was interrupted since it was last asked.

    A KeyboardInterrupt in the middle of an exchange would leave the other ranks waiting, or give
    them the answer to another question. In a single process nothing is changed.
    """
    arrived = threading.Event()

    def asked() -> bool:
        found = arrived.is_set()
        arrived.clear()
        return found

    if world_size() == 1 or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    # A signal that is ignored, or ends the process at once, keeps its effect.
    caught = [one for one in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(one))]
    before = {one: signal.signal(one, lambda number, frame: arrived.set()) for one in caught}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
