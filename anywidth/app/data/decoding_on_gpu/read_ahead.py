"""Items made in a background thread, a few in advance."""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Generator, Iterator
from threading import Condition, Thread
from typing import Generic, TypeVar

Item = TypeVar("Item")
Input = TypeVar("Input")
_ENDING_SECONDS = 10.0
"""A DataLoader takes 5 seconds to notice in a thread that a worker is gone."""


class ReadAhead(Generic[Item]):
    """Run a generator in a thread that stays `most` items ahead.

    An error in the generator is raised by `take`, in its turn. Whoever starts it must end it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: deque[Item | _Failed] = deque()
        self._changed = Condition()
        self._is_ended = False

    def start(self, items: Generator[Item, None, None]) -> None:
        self._thread = Thread(target=self._make, args=(items,), daemon=True)
        atexit.register(self.end)  # a thread that works on a GPU while Python ends may crash
        self._thread.start()

    def until_ended(self, inputs: Iterator[Input]) -> Iterator[Input]:
        """What the generator reads: it then stops at the next input when it is to end."""
        for each in inputs:
            if self._is_ended:
                raise InterruptedError
            yield each

    def take(self) -> Item:
        """The next item, when it is made."""
        with self._changed:
            self._changed.wait_for(lambda: self._made)
            item = self._made.popleft()
            self._changed.notify()
        if not isinstance(item, _Failed):
            return item
        try:
            raise item.error
        finally:
            del item  # which would hold the error, and the error this frame

    def end(self) -> bool:
        """Stop at the next input or item; false if none comes soon, as from a stopped worker."""
        if self._is_ended and not self._thread.is_alive():
            return True  # also while Python takes modules apart
        with self._changed:
            self._is_ended = True
            self._made.clear()
            self._changed.notify()
        self._thread.join(_ENDING_SECONDS)
        atexit.unregister(self.end)
        return not self._thread.is_alive()

    def _make(self, items: Generator[Item, None, None]) -> None:
        try:
            for item in items:
                if not self._keep(item):
                    break
        except BaseException as error:
            self._keep(_Failed(error))
        finally:
            items.close()

    def _keep(self, item: Item | _Failed) -> bool:
        """Wait for room; false if nobody takes items any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended or len(self._made) < self._most)
            if not self._is_ended:
                self._made.append(item)
                self._changed.notify()
            return not self._is_ended


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error
