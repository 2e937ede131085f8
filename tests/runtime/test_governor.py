"""The governor's rule: the widest width at which every queued request meets its deadline."""

from __future__ import annotations

import math

import pytest
from anywidth_runtime.errors import RequestError
from anywidth_runtime.governor import Governor
from anywidth_runtime.governor_limits import Ceiling
from anywidth_runtime.governor_menu import Choice, make_menu
from anywidth_runtime.governor_queue import DeadlineQueue, Waiting
from governed import gamma_arrivals, published_choices, replay
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.governor_rivals import FixedWidth, MostAccurateForHead, SlackFit

FOUR = [Choice(0.25, 1.0, 56), Choice(0.5, 3.0, 64), Choice(0.75, 7.0, 69), Choice(1.0, 12.0, 72)]


def queue_of(*deadlines_ms: float, size: float = 1.0) -> DeadlineQueue:
    queue = DeadlineQueue()
    for deadline in deadlines_ms:
        queue.push(Waiting(deadline / 1000, size=size))
    return queue


@pytest.mark.parametrize(
    ("deadlines", "width"),
    [
        ((12,), 1.0),
        ((11.9,), 0.75),
        ((math.inf,), 1.0),
        ((24, 24), 1.0),
        ((23.9, 23), 0.75),
        ((100, 100, 100, 9), 0.75),
        ((36, 36, 36, 36, 36), 0.75),
        ((36,) * 20, 0.25),
        ((0.1,), 0.25),
        ((36, math.inf, math.inf), 1.0),
    ],
)
def test_the_widest_that_is_in_time_for_all(deadlines: tuple[float, ...], width: float) -> None:
    assert Governor(FOUR).decide(queue_of(*deadlines), 0.0).width == width


@given(st.lists(st.floats(0.5, 200), min_size=1, max_size=30), st.floats(0, 5))
def test_a_wider_one_would_make_somebody_late(deadlines: list[float], now_ms: float) -> None:
    """Played through one by one, against the rule's arithmetic."""

    def all_in_time(choice: Choice) -> bool:
        ends = (now_ms + (k + 1) * choice.milliseconds for k in range(len(deadlines)))
        return all(end <= due + 1e-9 for end, due in zip(ends, sorted(deadlines), strict=True))

    chosen = Governor(FOUR).decide(queue_of(*deadlines), now_ms / 1000).width
    fitting = [one.width for one in FOUR if all_in_time(one)] or [0.25]
    assert chosen == max(fitting)


def test_large_requests_count_for_their_size() -> None:
    assert Governor(FOUR).decide(queue_of(24, size=2), 0).width == 1.0
    assert Governor(FOUR).decide(queue_of(24, size=2.1), 0).width == 0.75
    assert Governor(FOUR).decide(queue_of(24, 24, size=2), 0).width == 0.5


def test_a_width_that_was_asked_for_is_given_and_paid_by_the_others() -> None:
    queue = queue_of(20)
    queue.push(Waiting(0.021, width=1.0))
    # 12 ms of the 21 are spoken for: 9 are left for the first.
    assert Governor(FOUR).decide(queue, 0).width == 0.75
    queue.take()
    assert Governor(FOUR).decide(queue, 0).width == 1.0


def test_a_hopeless_wide_request_narrows_nobody() -> None:
    queue = queue_of(12)
    queue.push(Waiting(0.0121, width=1.0, size=5))
    assert Governor(FOUR).decide(queue, 0).width == 1.0


def governor_after(arrivals_ms: list[float], *, allowed_ms: float = 36.0) -> Governor:
    """A governor that has seen requests come at these moments."""
    governor = Governor(FOUR)
    for moment in arrivals_ms:
        governor.arrived(Waiting((moment + allowed_ms) / 1000), moment / 1000)
    return governor


BURST = [0.1 * number for number in range(9)]


def test_time_is_kept_for_the_rest_of_a_burst() -> None:
    waiting = queue_of(37, 37)
    assert Governor(FOUR).decide(waiting, 0.001).width == 1.0
    # About 9 in the last 36 ms, so 9 + 3 are expected: 14 requests in 72 ms.
    assert governor_after(BURST).decide(waiting, 0.001).width == 0.5


def test_a_request_alone_keeps_its_width_after_a_burst() -> None:
    assert governor_after(BURST).decide(queue_of(37), 0.001).width == 1.0


def test_a_burst_is_forgotten() -> None:
    # Ten times the time that its requests were allowed.
    assert governor_after(BURST).decide(queue_of(397, 397), 0.361).width == 1.0


def test_large_requests_to_come_count_for_their_size() -> None:
    one, large = governor_after([0.0]), Governor(FOUR)
    large.arrived(Waiting(0.036, size=9), 0.0)
    waiting = queue_of(36, 36)
    assert one.decide(waiting, 0.0).width == 1.0
    assert large.decide(waiting, 0.0).width == 0.5


def test_requests_without_a_deadline_keep_no_other_waiting() -> None:
    assert governor_after(BURST, allowed_ms=math.inf).decide(queue_of(36, 36), 0.001).width == 1.0


def test_a_hopeless_wide_request_narrows_nobody_in_a_burst() -> None:
    governor = governor_after([0.0, 0.0])
    queue = queue_of(36, 36)
    before = governor.decide(queue, 0.0).width
    queue.push(Waiting(0.037, width=1.0, size=5))
    assert governor.decide(queue, 0.0).width == before == 1.0


def test_several_workers_share_the_queue() -> None:
    queue = queue_of(24, 24, 24)
    assert Governor(FOUR).decide(queue, 0).width == 0.75
    assert Governor(FOUR, workers=2).decide(queue, 0).width == 1.0


def test_floors() -> None:
    hopeless = queue_of(0.1)
    assert Governor(FOUR, least_width=0.5).decide(hopeless, 0).width == 0.5
    assert Governor(FOUR, least_accuracy=65).decide(hopeless, 0).width == 0.75
    with pytest.raises(RequestError, match="90"):
        Governor(FOUR, least_accuracy=90)
    with pytest.raises(RequestError, match=r"1\.5"):
        Governor(FOUR, least_width=1.5)
    with pytest.raises(RequestError, match="known"):
        Governor([Choice(0.5, 1.0)], least_accuracy=1)


def test_widths_that_take_as_long_as_a_better_one_are_left_out() -> None:
    odd = Choice(0.3, 3.2, 58)
    assert make_menu([*FOUR, odd]) == tuple(FOUR)
    worse = Choice(0.8, 8.0, 68)
    assert make_menu([worse, *reversed(FOUR)]) == tuple(FOUR)
    named = Choice("found by search", 5.0, 70)
    assert [one.width for one in make_menu([*FOUR, named])] == [0.25, 0.5, "found by search", 1.0]


def test_without_accuracies_wider_is_better() -> None:
    bare = [Choice(one.width, one.milliseconds) for one in FOUR]
    assert [one.width for one in make_menu([*bare, Choice(0.6, 2.0)])] == [0.25, 0.6, 0.75, 1.0]


def test_a_hot_machine_narrows_and_a_cool_one_widens_again() -> None:
    degrees = 90.0
    governor = Governor(FOUR, ceiling=Ceiling(lambda: degrees, 80, every_ms=1000))
    widths = [governor.width_for(100, now) for now in (0, 0.5, 1, 2, 3, 4)]
    assert widths == [0.75, 0.75, 0.5, 0.25, 0.25, 0.25]
    degrees = 79.0
    assert governor.width_for(100, 5) == 0.25, "not cool enough to go up"
    degrees = 60.0
    assert [governor.width_for(100, now) for now in (6, 7, 8, 9)] == [0.5, 0.75, 1.0, 1.0]


def test_the_floor_wins_over_the_ceiling() -> None:
    governor = Governor(FOUR, least_width=0.5, ceiling=Ceiling(lambda: 99, 80, every_ms=1))
    assert [governor.width_for(100, now) for now in range(5)][-1] == 0.5


def test_a_meter_that_fails_counts_as_hot(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> float:
        raise OSError("no such sensor")

    governor = Governor(FOUR, ceiling=Ceiling(broken, 80, every_ms=1))
    assert [governor.width_for(100, now) for now in range(3)] == [0.75, 0.5, 0.25]
    assert len(caplog.records) == 1
    not_a_number = Governor(FOUR, ceiling=Ceiling(lambda: math.nan, 80, every_ms=1))
    assert not_a_number.width_for(100, 0) == 0.75


def test_hysteresis_goes_down_at_once_and_up_with_room_to_spare() -> None:
    governor = Governor(FOUR, hysteresis=0.1)
    budgets = (12.1, 11.9, 12.1, 13.0, 13.3, 11.0)
    assert [governor.width_for(ms, 0) for ms in budgets] == [1.0, 0.75, 0.75, 0.75, 1.0, 0.75]


def test_held_widths_widen_after_a_while_without_a_break() -> None:
    governor = Governor(FOUR, hold_ms=500)
    asked = [(0, 8), (0.1, 20), (0.4, 20), (0.5, 8), (0.6, 20), (1.0, 20), (1.1, 20)]
    widths = [governor.width_for(ms, now) for now, ms in asked]
    assert widths == [0.75, 0.75, 0.75, 0.75, 0.75, 0.75, 1.0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"workers": 0}, "workers"),
        ({"hysteresis": -0.1}, "hysteresis"),
        ({"hold_ms": math.nan}, "hold_ms"),
        ({"overhead_ms": -1}, "overhead_ms"),
    ],
)
def test_numbers_that_make_no_sense_are_named(arguments: dict[str, float], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        Governor(FOUR, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_latencies_that_make_no_sense_are_named(bad: float) -> None:
    with pytest.raises(RequestError, match="measure"):
        Governor([Choice(0.5, bad)])


@pytest.mark.parametrize("squared_variation", [2, 4, 8])
def test_bursts_beyond_the_full_widths_capacity_are_answered_in_time(
    squared_variation: float,
) -> None:
    """1.1 times what the full width can do, exact latencies: what is lost, the rule lost."""
    choices = published_choices()
    capacity = 1000 / max(one.milliseconds for one in choices)
    arrivals = gamma_arrivals(4000, 1.1 * capacity, squared_variation)
    ours = replay(arrivals, Governor(choices), choices)
    assert ours.in_time >= 0.998
    fixed = [replay(arrivals, FixedWidth(one), choices) for one in make_menu(choices)]
    as_often = [one.accuracy for one in fixed if one.in_time >= ours.in_time]
    assert ours.accuracy > max(as_often, default=0) + 3
    head = replay(arrivals, MostAccurateForHead(choices), choices)
    assert head.in_time < ours.in_time


def test_a_machine_slower_than_measured_is_noticed() -> None:
    choices = published_choices()
    capacity = 1000 / max(one.milliseconds for one in choices)
    arrivals = gamma_arrivals(4000, 1.1 * capacity, 4)
    governor = Governor(choices)
    slow = replay(arrivals, governor, choices, slower=1.5)
    assert slow.in_time >= 0.99
    assert governor.latencies.slowdown == pytest.approx(1.5, rel=0.1)
    blind = replay(arrivals, MostAccurateForHead(choices), choices, slower=1.5)
    assert blind.in_time < 0.5


def test_slackfit_takes_large_batches_when_time_is_short() -> None:
    times = {(one.width, batch): batch * one.milliseconds for one in FOUR for batch in (1, 2, 4)}
    accuracies = {one.width: one.accuracy or 0 for one in FOUR}
    fit = SlackFit(times, accuracies, buckets=47)
    assert fit.decide(queue_of(36), 0) == (1.0, 1)
    assert fit.decide(queue_of(36, 36, 36, 36), 0) == (0.75, 4)
    assert fit.decide(queue_of(4.5, 36, 36, 36), 0) == (0.25, 4)
    assert fit.decide(queue_of(0.1), 0) == (0.25, 1)
    paper = SlackFit(times, accuracies, buckets=47, fills_batches=True)
    assert paper.decide(queue_of(30), 0) == (0.75, 1)


def test_time_between_runs_counts_for_every_request() -> None:
    governor = Governor(FOUR)
    for _ in range(100):
        governor.note(1.0, 0.012, overhead=0.001)
    # Two requests in 25 ms leave 12.5 each, of which 1 is lost: too little for the widest.
    assert governor.decide(queue_of(25, 25), 0).width == 0.75
    assert governor.decide(queue_of(30, 30), 0).width == 1.0
