"""The scheduler: real threads, a real clock, a network that one can hold up."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from anywidth_runtime.errors import RequestError
from anywidth_runtime.governor import Decision, Governor
from anywidth_runtime.governor_menu import Choice
from anywidth_runtime.governor_scheduler import Closed, QueueFull, Scheduler, TooLate

LONG = 30.0
CHOICES = [Choice(0.25, 1.0), Choice(1.0, 10.0)]


class Network:
    """Notes what it runs, and waits while it is held."""

    def __init__(self) -> None:
        self.ran: list[tuple[Any, float | str]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_running = threading.Event()

    def run(self, values: Sequence[Any], width: float | str) -> list[Any]:
        self.is_running.set()
        assert self.may_go_on.wait(LONG)
        self.ran += [(value, width) for value in values]
        return [f"answer to {value}" for value in values]

    def hold(self, scheduler: Scheduler) -> None:
        """Returns once a run has begun that does not end."""
        self.may_go_on.clear()
        self.is_running.clear()
        scheduler.submit("holds the worker up")
        assert self.is_running.wait(LONG)

    def go_on(self) -> None:
        self.may_go_on.set()


@pytest.fixture
def network() -> Network:
    return Network()


def test_an_answer_says_how_it_came_about(network: Network) -> None:
    with Scheduler(network.run, Governor(CHOICES)) as scheduler:
        served = scheduler.submit("one", deadline_ms=60_000).result(LONG)
        assert scheduler.submit("two", width=0.25).result(LONG).width == 0.25
    assert served.answer == "answer to one"
    assert served.width == 1.0
    assert served.is_in_time
    assert served.waited_ms >= 0
    assert served.run_ms >= 0


def test_the_earliest_deadline_comes_first(network: Network) -> None:
    with Scheduler(network.run, Governor(CHOICES)) as scheduler:
        network.hold(scheduler)
        deadlines = {
            "last": 90_000.0,
            "any time": float("inf"),
            "first": 60_000.0,
            "next": 70_000.0,
        }
        futures = [scheduler.submit(name, deadline_ms=ms) for name, ms in deadlines.items()]
        network.go_on()
        for future in futures:
            future.result(LONG)
    assert [name for name, _ in network.ran[1:]] == ["first", "next", "last", "any time"]


def test_late_requests_are_dropped(network: Network) -> None:
    with Scheduler(network.run, Governor(CHOICES)) as scheduler:
        network.hold(scheduler)
        late = scheduler.submit("late", deadline_ms=20)
        fine = scheduler.submit("fine", deadline_ms=60_000)
        time.sleep(0.03)
        network.go_on()
        with pytest.raises(TooLate, match="20 ms"):
            late.result(LONG)
        assert fine.result(LONG).is_in_time
    assert [name for name, _ in network.ran[1:]] == ["fine"]


def test_late_requests_are_answered_after_the_others_if_told_so(network: Network) -> None:
    with Scheduler(network.run, Governor(CHOICES), late="answer") as scheduler:
        network.hold(scheduler)
        late = scheduler.submit("late", deadline_ms=20)
        fine = scheduler.submit("fine", deadline_ms=60_000)
        time.sleep(0.03)
        network.go_on()
        assert fine.result(LONG).is_in_time
        served = late.result(LONG)
    assert not served.is_in_time
    assert served.width == 0.25, "quickly, as it is late already"
    assert [name for name, _ in network.ran[1:]] == ["fine", "late"]


def test_the_queue_is_bounded(network: Network) -> None:
    with Scheduler(network.run, Governor(CHOICES), most_waiting=2) as scheduler:
        network.hold(scheduler)
        futures = [scheduler.submit(n) for n in range(2)]
        with pytest.raises(QueueFull, match="2 requests"):
            scheduler.submit("one too many")
        assert scheduler.waiting == 2
        network.go_on()
        assert [future.result(LONG).answer for future in futures] == ["answer to 0", "answer to 1"]
        assert scheduler.submit("again").result(LONG).answer == "answer to again"


def test_closing_answers_what_was_taken_and_takes_no_more(network: Network) -> None:
    scheduler = Scheduler(network.run, Governor(CHOICES))
    network.hold(scheduler)
    futures = [scheduler.submit(n) for n in range(5)]
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    while not scheduler.is_closed:
        time.sleep(0.001)
    with pytest.raises(Closed):
        scheduler.submit("too late")
    network.go_on()
    closing.join(LONG)
    assert [future.result(0).answer for future in futures] == [f"answer to {n}" for n in range(5)]


def test_closing_in_a_hurry_fails_what_is_left(network: Network) -> None:
    scheduler = Scheduler(network.run, Governor(CHOICES))
    network.hold(scheduler)
    future = scheduler.submit("waits")
    assert not scheduler.close(timeout=0.01)
    with pytest.raises(Closed):
        future.result(0)
    network.go_on()


def test_a_cancelled_request_leaves_the_queue(network: Network) -> None:
    with Scheduler(network.run, Governor(CHOICES)) as scheduler:
        network.hold(scheduler)
        gone, kept = scheduler.submit("gone"), scheduler.submit("kept")
        assert gone.cancel()
        assert scheduler.waiting == 1
        network.go_on()
        kept.result(LONG)
    assert [name for name, _ in network.ran[1:]] == ["kept"]


def test_an_error_of_the_network_reaches_who_asked_and_nobody_else() -> None:
    def run(values: Sequence[Any], width: float | str) -> list[Any]:
        if values[0] == "bad":
            raise RequestError("a picture of the wrong shape")
        return list(values)

    with Scheduler(run, Governor(CHOICES)) as scheduler:
        bad, good = scheduler.submit("bad"), scheduler.submit("good")
        with pytest.raises(RequestError, match="shape"):
            bad.result(LONG)
        assert good.result(LONG).answer == "good"


def test_an_error_of_a_policy_reaches_the_first_and_the_rest_go_on(network: Network) -> None:
    class Moody(Governor):
        def decide(self, queue: Any, now: float) -> Decision:
            if queue[0].payload.value == "bad":
                raise ZeroDivisionError("a policy of one's own")
            return super().decide(queue, now)

    with Scheduler(network.run, Moody(CHOICES)) as scheduler:
        bad, good = scheduler.submit("bad"), scheduler.submit("good")
        with pytest.raises(ZeroDivisionError):
            bad.result(LONG)
        assert good.result(LONG).answer == "answer to good"


def test_several_workers_run_at_once(network: Network) -> None:
    both = threading.Barrier(2, timeout=LONG)

    def run(values: Sequence[Any], width: float | str) -> list[Any]:
        both.wait()
        return list(values)

    with Scheduler(run, Governor(CHOICES, workers=2), workers=2) as scheduler:
        futures = [scheduler.submit(n) for n in range(4)]
        assert sorted(future.result(LONG).answer for future in futures) == [0, 1, 2, 3]


def test_many_threads_lose_nothing() -> None:
    with Scheduler(lambda values, width: list(values), Governor(CHOICES)) as scheduler:
        answers: list[Any] = []

        def ask(number: int) -> None:
            for k in range(50):
                answers.append(scheduler.submit((number, k)).result(LONG).answer)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    assert sorted(answers) == [(n, k) for n in range(8) for k in range(50)]


@pytest.mark.parametrize(
    ("arguments", "named"), [({"late": "maybe"}, "maybe"), ({"most_waiting": 0}, "most_waiting")]
)
def test_what_makes_no_sense_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        Scheduler(lambda values, width: list(values), Governor(CHOICES), **arguments)
