"""Other ways to choose a width, which `benchmarks.governor` compares with the governor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from anywidth_runtime.contents import Width
from anywidth_runtime.governor import Decision
from anywidth_runtime.governor_menu import Choice, make_menu
from anywidth_runtime.governor_queue import Waiting


class Rival:
    """A policy that learns nothing while it serves."""

    def arrived(self, request: Waiting, now: float) -> None:
        """Expects nothing."""

    def note(
        self, width: Width, seconds: float, *, size: float = 1.0, overhead: float = 0.0
    ) -> None:
        """Keeps to what was measured."""


class FixedWidth(Rival):
    """Every request at one width."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def decide(self, queue: Sequence[Waiting], now: float) -> Decision:
        return Decision(self._choice.width)

    def shortest(self, request: Waiting) -> float:
        return self._choice.milliseconds / 1000


class MostAccurateForHead(Rival):
    """The best width that is in time for the first request; ignores the requests behind it."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self.menu = make_menu(choices)

    def decide(self, queue: Sequence[Waiting], now: float) -> Decision:
        left = 1000 * (queue[0].deadline - now)
        fitting = [one for one in self.menu if one.milliseconds <= left]
        return Decision((fitting or self.menu)[-1 if fitting else 0].width)

    def shortest(self, request: Waiting) -> float:
        return self.menu[0].milliseconds / 1000


class SlackFit(Rival):
    """SlackFit of SuperServe (Khare et al., NSDI 2025, section 4).

    Offline, every pair of width and batch size falls into one of `buckets` equal ranges of latency,
    and each range keeps the pair with the largest batch (among these, the most accurate). Online,
    the range just below the remaining time of the first request is used: wide networks under low
    load, large batches when requests have queued up and time is short.

    Args:
        milliseconds: (width, batch) → measured time.
        accuracies: width → accuracy.
        buckets: number of latency ranges.
        fills_batches: use the range's largest batch even if the queue cannot fill it, as in the
            paper; if false, use only batches that the queue can fill.
    """

    def __init__(
        self,
        milliseconds: Mapping[tuple[Width, int], float],
        accuracies: Mapping[Width, float],
        *,
        buckets: int = 32,
        fills_batches: bool = False,
    ) -> None:
        self._milliseconds = dict(milliseconds)
        self._accuracies = dict(accuracies)
        self._low, self._high = min(milliseconds.values()), max(milliseconds.values())
        self._step = (self._high - self._low) / buckets or 1.0
        self._buckets = buckets
        self._fills = fills_batches
        batches = sorted({batch for _, batch in milliseconds})
        self._tables = {largest: self._table(largest) for largest in batches}

    def _table(self, largest: int) -> list[Decision | None]:
        """Per bucket, the pair to use if batches have at most this size."""
        table: list[Decision | None] = [None] * (self._buckets + 1)
        rank: list[tuple[float, float]] = [(0, 0)] * (self._buckets + 1)
        for (width, batch), value in self._milliseconds.items():
            if batch > largest:
                continue
            # A pair belongs to the first edge at or above its time, so that it always fits.
            bucket = math.ceil((value - self._low) / self._step - 1e-9)
            mine = (batch, self._accuracies[width])
            if mine > rank[bucket]:
                table[bucket], rank[bucket] = Decision(width, batch), mine
        return table

    def decide(self, queue: Sequence[Waiting], now: float) -> Decision:
        left = 1000 * (queue[0].deadline - now)
        waiting = len(queue)
        fitting = [size for size in self._tables if self._fills or size <= waiting]
        table = self._tables[max(fitting)]
        last = min(self._buckets, math.floor((min(left, self._high) - self._low) / self._step))
        for bucket in range(last, -1, -1):
            found = table[bucket]
            if found is not None:
                return Decision(found.width, min(found.batch, waiting))
        return Decision(min(self._milliseconds, key=self._milliseconds.__getitem__)[0])

    def shortest(self, request: Waiting) -> float:
        return self._low / 1000
