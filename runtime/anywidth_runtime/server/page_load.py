"""Load that the page can create, to show the governor at work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from concurrent.futures import Future
from typing import Any

from anywidth_runtime.errors import RequestError
from anywidth_runtime.governor_scheduler import Closed, QueueFull, Served, TooLate
from anywidth_runtime.server.counters import Moment
from anywidth_runtime.server.service import Service

MOST_PER_SECOND = 1000.0
MOST_DEADLINE_MS = 10_000.0
# A page that is silent for this long counts as closed, and its load ends.
_FORGOTTEN_AFTER = 3.0
_SHORTEST_SLEEP = 0.002
_MOST_LATE = 0.25


class Load:
    """Sends requests to the service at random times (a Poisson process).

    The queue, the governor and the metrics treat them like any others. The load ends by itself if
    `ask` is not called again.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._value = service.network.example()
        self._draw = random.Random(0)
        self._task: asyncio.Task[None] | None = None
        self._until = 0.0
        self.per_second = 0.0
        self.deadline_ms = service.settings.deadline_ms

    async def ask(self, per_second: float, deadline_ms: float) -> None:
        """Set the load for a few seconds."""
        if not 0 <= per_second <= MOST_PER_SECOND:
            raise RequestError(f"per_second {per_second}: expected 0 to {MOST_PER_SECOND:g}")
        if not 0 < deadline_ms <= MOST_DEADLINE_MS:
            raise RequestError(f"deadline_ms {deadline_ms}: expected up to {MOST_DEADLINE_MS:g}")
        self.per_second, self.deadline_ms = per_second, deadline_ms
        self._until = time.monotonic() + _FORGOTTEN_AFTER
        if per_second and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._send())

    async def _send(self) -> None:
        following = time.monotonic()
        with contextlib.suppress(Closed):  # the server ends
            while self.per_second and (now := time.monotonic()) < self._until:
                # Requests that a stalled event loop could not send are not sent in one burst.
                following = max(following, now - _MOST_LATE)
                while following <= now:
                    self._submit()
                    following += self._draw.expovariate(self.per_second)
                await asyncio.sleep(max(_SHORTEST_SLEEP, following - now))
        self.per_second = 0.0

    def _submit(self) -> None:
        scheduler = self._service.scheduler
        try:
            future = scheduler.submit(self._value, deadline_ms=self.deadline_ms)
        except QueueFull:
            self._service.metrics.turned_away("refused")
        else:
            future.add_done_callback(self._count)

    def _count(self, future: Future[Served]) -> None:
        error = future.exception()
        if isinstance(error, TooLate):
            self._service.metrics.dropped()
        elif error is None:
            served = future.result()
            self._service.metrics.served(
                served.width,
                served.waited_ms + served.run_ms,
                served.run_ms,
                is_in_time=served.is_in_time,
            )


def history(moments: list[Moment], now: float, seconds: float, bins: int) -> list[dict[str, Any]]:
    """Requests of the last seconds in equal intervals, oldest first."""
    step = seconds / bins

    def place(moment: Moment) -> int:
        return min(bins - 1, max(0, int((moment.at - (now - seconds)) / step)))

    found: list[dict[str, Any]] = [{"requests": 0, "in_time": 0} for _ in range(bins)]
    for number, group in itertools.groupby(moments, key=place):
        inside = list(group)
        widths = [one.width for one in inside if isinstance(one.width, float)]
        found[number]["requests"] += len(inside)
        found[number]["in_time"] += sum(one.is_in_time for one in inside)
        if widths:
            found[number] |= {
                "narrowest": min(widths),
                "widest": max(widths),
                "mean": sum(widths) / len(widths),
            }
    return found
