"""Choose a width for every request, so that all are answered in time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from anywidth_runtime.contents import Width
from anywidth_runtime.errors import RequestError
from anywidth_runtime.governor_latencies import Latencies
from anywidth_runtime.governor_limits import Ceiling, Steadiness
from anywidth_runtime.governor_menu import Choice, make_menu
from anywidth_runtime.governor_queue import Arrivals, Waiting
from anywidth_runtime.network import Network

# The largest share of the remaining time of a request that is reserved for slow runs.
_LARGEST_RESERVE = 0.25


class Decision(NamedTuple):
    """Run the first `batch` requests of the queue, as one batch, at `width`."""

    width: Width
    batch: int = 1


class Policy(Protocol):
    """The interface that a scheduler uses to choose widths."""

    def arrived(self, request: Waiting, now: float) -> None:
        """Record that a request came."""

    def decide(self, queue: Sequence[Waiting], now: float) -> Decision:
        """Choose what to run next from a queue that is not empty and sorted by deadline."""

    def shortest(self, request: Waiting) -> float:
        """The shortest time, in seconds, in which a request can be answered."""

    def note(
        self, width: Width, seconds: float, *, size: float = 1.0, overhead: float = 0.0
    ) -> None:
        """Record how long a run took at a width, for requests of this total size.

        `overhead` is the time between this run and the previous one.
        """


class Governor:
    """The widest width at which every queued request still meets its own deadline.

    The request with the earliest deadline is served first. If the k-th request is due in s seconds,
    a width that takes t serves all requests in time if k * t <= s for every k. The widest such
    width is used for one request. Then the choice is made again, including requests that arrived
    meanwhile. Requests with several images, or with larger ones, count as more than one.

    While others wait, requests that are still to come count too (`Arrivals`): a burst is short at
    first, and a width that just serves its first requests leaves no time for the others.

    Latencies follow the measured times of past runs, and a reserve covers runs that take longer
    than expected (`Latencies`).

    Args:
        choices: widths with their milliseconds and, if known, accuracies.
        least_width: never run narrower than this.
        least_accuracy: never run less accurate than this.
        ceiling: limits the width while a meter reads above its limit; `least_width` still holds.
        hysteresis: switch to a wider width only if this share of its time is to spare, so that a
            video does not flicker. 0.1 suits video; 0 is best for single requests.
        hold_ms: switch to a wider width only if wider widths have fitted for this long.
        overhead_ms: time from the end of a run until the client has the answer.
        workers: number of runs at the same time.

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
        # Requests may ask for widths that are not on the menu.
        self.latencies = Latencies({one.width: one.milliseconds for one in offered})
        self._ceiling = ceiling
        self._steadiness = Steadiness(hysteresis, hold_ms)
        self._overhead = overhead_ms / 1000
        self._workers = workers
        self._arrivals = Arrivals()

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
        # From the table, which a network of another opener (`ray_app`) may make its own.
        rows = [row for row in network.table if row.latency_ms is not None]
        return cls([Choice(r.width, r.latency_ms or 0.0, r.accuracy) for r in rows], **settings)

    def arrived(self, request: Waiting, now: float) -> None:
        self._arrivals.note(request.size, request.deadline - now, now)

    def decide(self, queue: Sequence[Waiting], now: float) -> Decision:
        """The width for the first request of a queue sorted by deadline."""
        asked = queue[0].width
        if asked is not None:
            return Decision(asked)
        if queue[0].is_late:
            return Decision(self.menu[0].width)
        room = self._room(queue, now)
        if len(queue) > 1:
            room = min(room, self._room_with_more(queue, now))
        return Decision(self._widest_within(room, now))

    def width_for(self, milliseconds: float, now: float | None = None) -> Width:
        """The widest width for a single request that is due in `milliseconds`."""
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
        """How many seconds a run may take so that all requests are still in time."""
        start, workers = now + self._overhead, self._workers
        reserve, each, room = self.latencies.reserve, self.latencies.overhead, math.inf
        # Work up to this request: seconds that do not depend on the width, and sizes that do.
        fixed, sizes = 0.0, 0.0
        for request in queue:
            size = request.size
            left = request.deadline - start
            if left == math.inf:
                # Infinity sorts last: no later request has a deadline.
                break
            most = _LARGEST_RESERVE * left
            left -= reserve if reserve < most else most
            if request.width is None:
                # It starts when the workers have finished the work before it.
                left = (left - fixed - each) / (sizes / workers + size)
                fixed += each / workers
                sizes += size
            else:
                own = self.latencies.expected(request.width, size)
                left -= fixed + own
                fixed += own / workers
                if left <= 0 or not sizes:
                    # It is late whatever width the requests before it get, or there are none.
                    continue
                left /= sizes / workers
            if left < room:
                room = left
        return room

    def _room_with_more(self, queue: Sequence[Waiting], now: float) -> float:
        """How many seconds a run may take if more requests come, so that they are in time too.

        They come within the time that requests are usually allowed, and are allowed as long.
        """
        seconds, more = 2 * self._arrivals.allowed, self._arrivals.expected(now)
        if not more:
            return math.inf
        fixed, sizes, each = self._overhead + self.latencies.reserve, more, self.latencies.overhead
        fixed += each * more / self._workers
        for request in queue:
            if request.deadline > now + seconds:
                break
            if request.width is None:
                fixed += each / self._workers
                sizes += request.size
                continue
            own = self.latencies.expected(request.width, request.size)
            if now + own <= request.deadline:
                fixed += own / self._workers
        return (seconds - fixed) * self._workers / sizes

    def _widest_within(self, room: float, now: float) -> Width:
        count, run = len(self.menu), self.latencies.run
        highest = count - 1 if self._ceiling is None else self._ceiling.highest(now, count)

        def fits(spare: float) -> int:
            for place in range(highest, 0, -1):
                if run(self.menu[place].width) * (1 + spare) <= room:
                    return place
            return 0

        return self.menu[self._steadiness.settle(fits, now)].width
