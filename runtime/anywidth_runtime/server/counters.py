"""The counters of the server, for Prometheus and for its page."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_KEPT_SECONDS = 60.0
_MOST_KEPT = 50_000


class Moment(NamedTuple):
    """A finished request: its end, width (None if dropped), whether it was in time, its run."""

    at: float
    width: float | str | None
    is_in_time: bool
    run_ms: float


class Metrics:
    """Counters of one server.

    Args:
        waiting: returns the number of waiting requests.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "anywidth_requests",
            "Requests by outcome: answered, late, dropped, refused, wrong, failed",
            ["outcome"],
            registry=self.registry,
        )
        self._widths = Counter(
            "anywidth_width_served", "Answers by width", ["width"], registry=self.registry
        )
        self._seconds = Histogram(
            "anywidth_request_seconds",
            "From the arrival of a request to its answer",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._run_seconds = Histogram(
            "anywidth_run_seconds",
            "One run of the network",
            ["width"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        Gauge(
            "anywidth_requests_waiting", "Requests in the queue", registry=self.registry
        ).set_function(waiting)
        for outcome in ("answered", "late", "dropped", "refused", "wrong", "failed"):
            self._requests.labels(outcome)
        self._recent: deque[Moment] = deque(maxlen=_MOST_KEPT)
        self._lock = threading.Lock()

    def served(
        self, width: float | str, milliseconds: float, run_ms: float, *, is_in_time: bool
    ) -> None:
        """Count an answer."""
        self._requests.labels("answered" if is_in_time else "late").inc()
        self._widths.labels(f"{width}").inc()
        self._seconds.observe(milliseconds / 1000)
        self._run_seconds.labels(f"{width}").observe(run_ms / 1000)
        self._keep(Moment(time.monotonic(), width, is_in_time, run_ms))

    def dropped(self) -> None:
        """Count a request that could not be in time."""
        self._requests.labels("dropped").inc()
        self._keep(Moment(time.monotonic(), None, False, 0.0))

    def turned_away(self, outcome: str) -> None:
        """Count a request that never reached the queue, or that failed."""
        self._requests.labels(outcome).inc()

    def recent(self, seconds: float) -> list[Moment]:
        """Requests that ended in the last seconds, oldest first."""
        since = time.monotonic() - seconds
        with self._lock:
            return [moment for moment in self._recent if moment.at >= since]

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _keep(self, moment: Moment) -> None:
        with self._lock:
            self._recent.append(moment)
            while self._recent[0].at < moment.at - _KEPT_SECONDS:
                self._recent.popleft()
