"""How many requests are likely to come next."""

from __future__ import annotations

import math

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
