"""Runs requests in the order of their deadlines, each at the width that a policy chooses."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from anywidth_runtime.errors import RequestError
from anywidth_runtime.governor import Decision, Policy
from anywidth_runtime.governor_latencies import Width
from anywidth_runtime.governor_queue import DeadlineQueue, Waiting

Run = Callable[[Sequence[Any], Width], Sequence[Any]]


class QueueFull(RequestError):
    """So many requests wait that one more is refused."""


class TooLate(RequestError):
    """A request was dropped: it could not be answered before its deadline at any width."""


class Closed(RequestError):
    """The scheduler takes no more requests."""


@dataclass(frozen=True)
class Served:
    """An answer, and how it came about.

    Args:
        answer: what `run` returned for the request.
        width: the width that it ran at.
        waited_ms: from submission to the start of its run.
        run_ms: how long the run took.
        is_in_time: whether it was ready before its deadline.
    """

    answer: Any
    width: Width
    waited_ms: float
    run_ms: float
    is_in_time: bool


@dataclass(frozen=True)
class _Job:
    """What a waiting request carries."""

    value: Any
    submitted: float
    deadline: float
    size: float
    future: Future[Served]


class _Turn(NamedTuple):
    """What a worker does next; `woke` is when it was woken up, None if it did not wait."""

    decision: Decision
    jobs: list[_Job]
    woke: float | None


class Scheduler:
    """A queue, a policy and the threads that run a network.

    Args:
        run: (values, width) → one answer per value.
        policy: chooses widths.
        late: "drop" answers a request that cannot be in time with `TooLate`; "answer" runs it at
            the narrowest width once no other request would be late because of it.
        most_waiting: a request that comes while so many wait is refused with `QueueFull`.
        workers: how many runs go on at once.
        clock: the present time in seconds.
    """

    def __init__(
        self,
        run: Run,
        policy: Policy,
        *,
        late: Literal["drop", "answer"] = "drop",
        most_waiting: int = 256,
        workers: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if late not in ("drop", "answer"):
            raise RequestError(f"late={late!r}: expected 'drop' or 'answer'")
        if most_waiting < 1 or workers < 1:
            raise RequestError(
                f"most_waiting={most_waiting}, workers={workers}: expected at least 1 of each"
            )
        self.policy = policy
        self.clock = clock
        self._run = run
        self._drops = late == "drop"
        self._most = most_waiting
        self._queue = DeadlineQueue()
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"anywidth-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        value: Any,
        *,
        deadline_ms: float = math.inf,
        width: Width | None = None,
        size: float = 1.0,
        since: float | None = None,
    ) -> Future[Served]:
        """Queues a request; the future holds its answer, or why there is none.

        A future that is cancelled before its run begins leaves the queue.

        Args:
            value: what to run the network on.
            deadline_ms: when the answer is due.
            width: the width to run at, if it is not for the policy to choose.
            size: how much work it is, compared with what the policy's latencies are for.
            since: when the request came, by this scheduler's clock; now if not given.
        """
        start = self.clock() if since is None else since
        future: Future[Served] = Future()
        job = _Job(value, start, start + deadline_ms / 1000, size, future)
        waiting = Waiting(job.deadline, width, size, job)
        with self._changed:
            if self._is_closed:
                raise Closed("the scheduler is closed: it takes no more requests")
            if len(self._queue) >= self._most:
                raise QueueFull(f"{self._most} requests wait already; try again later")
            self._queue.push(waiting)
            self._changed.notify()
        future.add_done_callback(lambda done: self._forget(waiting) if done.cancelled() else None)
        return future

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._is_closed

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def close(self, timeout: float | None = None) -> bool:
        """Takes no more requests, answers those that wait, and ends the threads.

        Returns whether all was answered within `timeout` seconds. What was not is dropped.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        end = math.inf if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if timeout is None else max(0.0, end - time.monotonic()))
        with self._changed:
            left = self._queue.take(len(self._queue))
        for waiting in left:
            _fail(waiting.payload.future, Closed("the scheduler closed before this request ran"))
        return not left and not any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _forget(self, waiting: Waiting) -> None:
        with self._changed:
            self._queue.remove(waiting)

    def _work(self) -> None:
        # When this worker was last free: what it did since, besides running the network, is
        # overhead that every request behind it waits for.
        free = self.clock()
        while (turn := self._next()) is not None:
            if turn.jobs:
                free = self._carry_out(turn, free if turn.woke is None else turn.woke)

    def _next(self) -> _Turn | None:
        """What to run now; None once the scheduler is closed and empty."""
        lost: list[tuple[_Job, BaseException]] = []
        woke: float | None = None
        with self._changed:
            while not self._queue:
                if self._is_closed:
                    return None
                self._changed.wait()
                woke = self.clock()
            now = self.clock()
            lost += [(job, _too_late(job, now)) for job in self._sort_out_late(now)]
            decision, jobs = Decision(0.0), []
            if self._queue:
                try:
                    decision = self.policy.decide(self._queue, now)
                except Exception as error:  # a policy of one's own: its request fails, not us
                    lost += [(one.payload, error) for one in self._queue.take()]
                else:
                    taken = [one.payload for one in self._queue.take(decision.batch)]
                    jobs = [job for job in taken if job.future.set_running_or_notify_cancel()]
        # Outside the lock: whoever waits for a future may do anything when it is set.
        for job, reason in lost:
            _fail(job.future, reason)
        return _Turn(decision, jobs, woke)

    def _sort_out_late(self, now: float) -> list[_Job]:
        """Requests that no width can answer in time, and that are dropped."""
        dropped: list[_Job] = []
        while self._queue:
            first = self._queue[0]
            if first.is_late or now + self.policy.shortest(first) <= first.deadline:
                break
            if self._drops:
                dropped += [one.payload for one in self._queue.take()]
            else:
                self._queue.put_behind(first)
        return dropped

    def _carry_out(self, turn: _Turn, free: float) -> float:
        """Runs the network, hands out the answers, and returns when the run ended."""
        width, jobs = turn.decision.width, turn.jobs
        start = self.clock()
        try:
            answers = self._run([job.value for job in jobs], width)
        except BaseException as error:
            for job in jobs:
                _fail(job.future, error)
            return self.clock()
        end = self.clock()
        size = sum(job.size for job in jobs)
        with self._changed:
            self.policy.note(width, end - start, size=size, overhead=start - free)
        for job, answer in zip(jobs, answers, strict=True):
            job.future.set_result(
                Served(
                    answer,
                    width,
                    1000 * (start - job.submitted),
                    1000 * (end - start),
                    end <= job.deadline,
                )
            )
        return end


def _fail(future: Future[Served], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        future.set_exception(error)


def _too_late(job: _Job, now: float) -> TooLate:
    had, passed = 1000 * (job.deadline - job.submitted), 1000 * (now - job.submitted)
    return TooLate(
        f"no width answers within {had:.4g} ms any more: {passed:.4g} ms passed before its turn "
        "came; allow more time, or send fewer requests"
    )
