"""Requests that wait for a network, the earliest deadline first."""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Iterator, Sequence
from typing import Any, overload

_ORDER = itertools.count()


class Waiting:
    """One request in a queue.

    Args:
        deadline: when its answer is due, in seconds on the clock of the queue's user; infinity if
            it has no deadline.
        width: the width that the request asks for; None if the governor chooses.
        size: its work relative to the example that latencies were measured with: images times
            pixels per image.
        payload: any object of the queue's user.
    """

    __slots__ = ("deadline", "is_late", "order", "payload", "size", "width")

    def __init__(
        self,
        deadline: float = math.inf,
        width: float | str | None = None,
        size: float = 1.0,
        payload: Any = None,
    ) -> None:
        self.deadline = deadline
        self.width = width
        self.size = size
        self.payload = payload
        self.is_late = False
        self.order = next(_ORDER)

    def __lt__(self, other: Waiting) -> bool:
        return (self.deadline, self.order) < (other.deadline, other.order)


class DeadlineQueue(Sequence[Waiting]):
    """Requests sorted by deadline; equal deadlines in the order of arrival.

    It is a sorted list: with the hundreds of requests in a bounded queue, an insertion takes about
    a microsecond, and a governor reads it from front to back.
    """

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []

    def push(self, request: Waiting) -> None:
        insort(self._waiting, request)

    def take(self, count: int = 1) -> list[Waiting]:
        """Remove and return the first requests."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def remove(self, request: Waiting) -> bool:
        """Remove a request; returns whether it was still waiting."""
        kept = [one for one in self._waiting if one is not request]
        found = len(kept) < len(self._waiting)
        self._waiting = kept
        return found

    def put_behind(self, request: Waiting) -> None:
        """Mark a request as late: it no longer competes with requests that can be in time."""
        self.remove(request)
        request.deadline, request.is_late = math.inf, True
        self.push(request)

    @overload
    def __getitem__(self, index: int) -> Waiting: ...

    @overload
    def __getitem__(self, index: slice) -> list[Waiting]: ...

    def __getitem__(self, index: int | slice) -> Waiting | list[Waiting]:
        return self._waiting[index]

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)
