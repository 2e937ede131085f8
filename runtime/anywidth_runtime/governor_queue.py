"""Requests that wait for a network, the earliest deadline first, and those likely to come."""

from __future__ import annotations

import itertools
import math
from bisect import insort
from dataclasses import dataclass, field
from typing import Any

from anywidth_runtime.contents import Width

_ORDER = itertools.count()


@dataclass(slots=True, eq=False)
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

    deadline: float = math.inf
    width: Width | None = None
    size: float = 1.0
    payload: Any = None
    is_late: bool = field(default=False, init=False)
    order: int = field(default_factory=_ORDER.__next__, init=False)

    def __lt__(self, other: Waiting) -> bool:
        return (self.deadline, self.order) < (other.deadline, other.order)


class DeadlineQueue(list[Waiting]):
    """Requests sorted by deadline; equal deadlines in the order of arrival.

    With the hundreds of requests in a bounded queue, an insertion takes about a microsecond, and a
    governor reads it from front to back.
    """

    def push(self, request: Waiting) -> None:
        insort(self, request)

    def take(self, count: int = 1) -> list[Waiting]:
        """Remove and return the first requests."""
        taken = self[:count]
        del self[:count]
        return taken

    def put_behind(self, request: Waiting) -> None:
        """Mark a request as late: it no longer competes with requests that can be in time."""
        self.remove(request)
        request.deadline, request.is_late = math.inf, True
        self.push(request)


# The share of the newest request in the mean of the time that requests are allowed.
_ALLOWED_SHARE = 0.1


class Arrivals:
    """Requests come in bursts: as many are expected next as came lately, and some more.

    Each request that came counts as its size times exp(-age / allowed), where `allowed` is the mean
    time from arrival to deadline. The sum is about the work that came during the last `allowed`
    seconds. One standard deviation is added, as for requests that come independently.
    """

    def __init__(self) -> None:
        self.allowed = 0.0
        self._work = 0.0
        self._squares = 0.0
        self._last = 0.0

    def note(self, size: float, allowed: float, now: float) -> None:
        """Record that a request came; one without a deadline keeps no other waiting."""
        if not 0 < allowed < math.inf:
            return
        if self.allowed:
            self.allowed += _ALLOWED_SHARE * (allowed - self.allowed)
        else:
            self.allowed = allowed
        fade = self._fade(now)
        self._work = self._work * fade + size
        self._squares = self._squares * fade + size * size
        self._last = max(now, self._last)

    def expected(self, now: float) -> float:
        """The sizes of all requests that are likely to come within the next `allowed` seconds."""
        fade = self._fade(now)
        return self._work * fade + math.sqrt(self._squares * fade)

    def _fade(self, now: float) -> float:
        return math.exp(-max(0.0, now - self._last) / self.allowed) if self.allowed else 0.0
