"""Chooses a width for every request, so that all of them are answered in time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from anywidth_runtime.errors import RequestError
from anywidth_runtime.governor_latencies import Latencies, Width
from anywidth_runtime.governor_limits import Ceiling, Steadiness
from anywidth_runtime.governor_menu import Choice, make_menu
from anywidth_runtime.governor_queue import Waiting
from anywidth_runtime.network import Network

# Of the time that a request has left, no more than this is set aside for surprises.
_LARGEST_RESERVE = 0.25


class Decision(NamedTuple):
    """Run the first `batch` requests of the queue, as one batch, at `width`."""

    width: Width
    batch: int = 1


class Policy(Protocol):
    """What a scheduler asks: which width next, and how long the shortest run takes."""

    def decide(self, queue: Sequence[Waiting], now: float) -> Decision:
        """What to run next, of a queue that is not empty and in the order of deadlines."""

    def shortest(self, request: Waiting) -> float:
        """The least seconds in which a request can be answered."""

    def note(
        self, width: Width, seconds: float, *, size: float = 1.0, overhead: float = 0.0
    ) -> None:
        """Learns how long a run at a width took, on requests of this size together.

        `overhead` is what passed between this run and the one before it.
        """


class Governor:
    """The widest width at which every queued request still meets its own deadline.

    Requests are served by the earliest deadline. If the k-th of them is due in s seconds, a width
    that takes t serves all of them in time if k * t <= s for every k. Of the widths that do, the
    widest is taken, for one request; then the question is asked again, with what has arrived
    since. Requests of several images, and larger ones, count for more than one.

    Latencies are corrected by what was just measured, and a reserve covers runs that take longer
    than expected (`Latencies`).

    Args:
        choices: widths with their milliseconds and, if known, accuracies.
        least_width: never run narrower than this.
        least_accuracy: never run less accurate than this.
        ceiling: allows narrower widths only while a meter reads above its limit. The floor wins.
        hysteresis: take a wider width only if this share of its time is left over, so that
            pictures of a video do not flicker. 0.1 suits video; 0 is best for single requests.
        hold_ms: and only if wider widths have fitted for this long.
        overhead_ms: what passes between the end of a run and the answer at the client.
        workers: how many runs go on at once.

    Example:
        governor = Governor.of(net)
        width = governor.width_for(milliseconds=20)
        start = time.perf_counter()
        answer = net.run(images, width=width)
        governor.note(width, time.perf_counter() - start)
    """

    def __init__(
        self,
        choices: Iterable[Choice],
        *,
        least_width: float | None = None,
        least_accuracy: float | None = None,
        ceiling: Ceiling | None = None,
        hysteresis: float = 0.0,
        hold_ms: float = 0.0,
        overhead_ms: float = 0.0,
        workers: int = 1,
    ) -> None:
        if workers < 1:
            raise RequestError(f"workers={workers}: expected at least 1")
        if not (0 <= overhead_ms < math.inf):
            raise RequestError(f"overhead_ms={overhead_ms!r}: expected milliseconds, not below 0")
        offered = list(choices)
        self.menu = make_menu(offered, least_width=least_width, least_accuracy=least_accuracy)
        # Requests may insist on widths that the menu leaves out.
        self.latencies = Latencies({one.width: one.milliseconds for one in offered})
        self._ceiling = ceiling
        self._steadiness = Steadiness(hysteresis, hold_ms)
        self._overhead = overhead_ms / 1000
        self._workers = workers

    @classmethod
    def of(cls, network: Network, **settings: Any) -> Governor:
        """A governor for all widths of a network; its latency must have been measured here.

        Args:
            network: what `anywidth_runtime.open` returned.
            settings: as for `Governor`.
        """
        if not network.is_measured:
            raise RequestError(
                f"{network.path}: latency was not measured on this machine with "
                f"{network.threads} threads; call measure() once"
            )
        rows = [row for row in network.table if row.latency_ms is not None]
        return cls([Choice(r.width, r.latency_ms or 0.0, r.accuracy) for r in rows], **settings)

    def decide(self, queue: Sequence[Waiting], now: float) -> Decision:
        """The width for the first request of a queue that is in the order of deadlines."""
        asked = queue[0].width
        if asked is not None:
            return Decision(asked)
        if queue[0].is_late:
            return Decision(self.menu[0].width)
        return Decision(self._widest_within(self._room(queue, now), now))

    def width_for(self, milliseconds: float, now: float | None = None) -> Width:
        """The widest width for a single request that is due in so many milliseconds."""
        if not milliseconds > 0:
            raise RequestError(f"milliseconds={milliseconds!r}: expected a number above 0")
        start = time.perf_counter() if now is None else now
        return self.decide([Waiting(start + milliseconds / 1000)], start).width

    def shortest(self, request: Waiting) -> float:
        width = self.menu[0].width if request.width is None else request.width
        return self.latencies.expected(width, request.size) + self._overhead

    def note(
        self, width: Width, seconds: float, *, size: float = 1.0, overhead: float = 0.0
    ) -> None:
        self.latencies.note(width, seconds / size, overhead)

    def _room(self, queue: Sequence[Waiting], now: float) -> float:
        """The seconds that a run may take if all requests are to be in time."""
        start, workers = now + self._overhead, self._workers
        reserve, each, room = self.latencies.reserve, self.latencies.overhead, math.inf
        # Work up to the present request: seconds whatever the width, and sizes at the one sought.
        fixed, sizes = 0.0, 0.0
        for request in queue:
            size = request.size
            left = request.deadline - start
            if left == math.inf:
                # Infinity sorts last: nobody behind is in a hurry either.
                break
            most = _LARGEST_RESERVE * left
            left -= reserve if reserve < most else most
            if request.width is None:
                # It begins when what is before it has been shared out among the workers.
                left = (left - fixed - each) / (sizes / workers + size)
                fixed += each / workers
                sizes += size
            else:
                own = self.latencies.expected(request.width, size)
                left -= fixed + own
                fixed += own / workers
                if left <= 0 or not sizes:
                    # Too late at any width of the others, or there are none before it.
                    continue
                left /= sizes / workers
            if left < room:
                room = left
        return room

    def _widest_within(self, room: float, now: float) -> Width:
        count, run = len(self.menu), self.latencies.run
        highest = count - 1 if self._ceiling is None else self._ceiling.highest(now, count)

        def fits(spare: float) -> int:
            for place in range(highest, 0, -1):
                if run(self.menu[place].width) * (1 + spare) <= room:
                    return place
            return 0

        return self.menu[self._steadiness.settle(fits, now)].width
