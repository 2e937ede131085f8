"""Run requests in the order of their deadlines, each at the width that a policy chooses."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from anywidth_runtime.contents import Width
from anywidth_runtime.errors import RequestError
from anywidth_runtime.governor import Decision, Policy
from anywidth_runtime.governor_queue import DeadlineQueue, Waiting

Run = Callable[[Sequence[Any], Width], Sequence[Any]]


class QueueFull(RequestError):
    """The queue is full, and the request was refused."""


class TooLate(RequestError):
    """The request was dropped, because no width could answer it before its deadline."""


class Closed(RequestError):
    """The scheduler takes no more requests."""


@dataclass(frozen=True)
class Served:
    """An answer, with its width and times.

    Args:
        answer: the result of `run` for the request.
        width: the width it ran at.
        waited_ms: time from submission to the start of its run.
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
    """The payload of a waiting request."""

    value: Any
    submitted: float
    deadline: float
    size: float
    future: Future[Served]


class _Turn(NamedTuple):
    """The next run of a worker; `woke` is when it was woken up, None if it did not wait."""

    decision: Decision
    jobs: list[_Job]
    woke: float | None


class Scheduler:
    """A queue, a policy and the threads that run a network.

    Args:
        run: (values, width) → one answer per value.
        policy: chooses widths.
        late: with "drop", a request that cannot be in time fails with `TooLate`; with "answer", it
            runs at the narrowest width once this makes no other request late.
        most_waiting: if this many requests wait, further ones are refused with `QueueFull`.
        workers: number of runs at the same time.
        clock: returns the current time in seconds.
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
        """Queue a request; the future gets its answer or an error.

        A future that is cancelled before its run starts leaves the queue.

        Args:
            value: the input of the network.
            deadline_ms: when the answer is due.
            width: the width to run at; if not given, the policy chooses.
            size: its work relative to the example that the policy's latencies are for.
            since: when the request arrived, on this scheduler's clock; now if not given.
        """
        start = self.clock() if since is None else since
        future: Future[Served] = Future()
        job = _Job(value, start, start + deadline_ms / 1000, size, future)
        waiting = Waiting(job.deadline, width, size, job)
        with self._changed:
            if self._is_closed:
                raise Closed("the scheduler is closed: it takes no more requests")
            if len(self._queue) >= self._most:
                raise QueueFull(f"{self._most} requests are waiting already; try again later")
            self.policy.arrived(waiting, start)
            self._queue.push(waiting)
            self._changed.notify()
        future.add_done_callback(lambda done: self._forget(waiting) if done.cancelled() else None)
        return future

    @property
    def is_closed(self) -> bool:
        """Whether it is closed to new requests."""
        return self._is_closed

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    def close(self, timeout: float | None = None) -> bool:
        """Refuse new requests, answer the waiting ones, and end the threads.

        Returns whether all were answered within `timeout` seconds; the others are dropped.
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
        with self._changed, contextlib.suppress(ValueError):  # it may have been taken
            self._queue.remove(waiting)

    def _work(self) -> None:
        # When this worker was last free. The time since then, apart from running the network, is
        # overhead that every request behind it waits for.
        free = self.clock()
        while (turn := self._next()) is not None:
            if turn.jobs:
                free = self._carry_out(turn, free if turn.woke is None else turn.woke)

    def _next(self) -> _Turn | None:
        """The next run; None if the scheduler is closed and empty."""
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
                except Exception as error:  # of a user's policy: its request fails
                    lost += [(one.payload, error) for one in self._queue.take()]
                else:
                    taken = [one.payload for one in self._queue.take(decision.batch)]
                    jobs = [job for job in taken if job.future.set_running_or_notify_cancel()]
        # Outside the lock, because setting a future may run any callback.
        for job, reason in lost:
            _fail(job.future, reason)
        return _Turn(decision, jobs, woke)

    def _sort_out_late(self, now: float) -> list[_Job]:
        """The requests that no width can answer in time; they are dropped."""
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
        """Run the network and set the answers; returns when the run ended."""
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
        f"no width can answer within {had:.4g} ms any more: {passed:.4g} ms passed before its turn "
        "came; allow more time, or send fewer requests"
    )
