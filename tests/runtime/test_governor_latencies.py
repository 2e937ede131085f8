"""Latencies that follow what was measured."""

from __future__ import annotations

import random

import pytest
from anywidth_runtime.governor_latencies import Latencies


def test_a_slower_machine_slows_every_width() -> None:
    latencies = Latencies({0.5: 2.0, 1.0: 10.0})
    for _ in range(30):
        latencies.note(0.5, 0.003)
    assert latencies.expected(0.5) == pytest.approx(0.003, rel=0.05)
    assert latencies.expected(1.0) == pytest.approx(0.015, rel=0.3)


def test_what_one_width_differs_by_stays_with_it() -> None:
    latencies = Latencies({0.5: 2.0, 1.0: 10.0})
    for _ in range(400):
        latencies.note(0.5, 0.003)
        latencies.note(1.0, 0.010)
    assert latencies.expected(0.5) == pytest.approx(0.003, rel=0.05)
    assert latencies.expected(1.0) == pytest.approx(0.010, rel=0.05)


def test_one_interrupted_run_changes_little() -> None:
    latencies = Latencies({1.0: 10.0})
    latencies.note(1.0, 1.0)
    assert latencies.expected(1.0) < 0.0115


def test_the_reserve_covers_nearly_all_runs() -> None:
    latencies, draw = Latencies({1.0: 10.0}), random.Random(0)
    surprises = 0
    for number in range(20_000):
        seconds = 0.010 + (draw.expovariate(1 / 0.004) if draw.random() < 0.02 else 0)
        surprises += number >= 5000 and seconds > latencies.expected(1.0) + latencies.reserve
        latencies.note(1.0, seconds)
    assert surprises / 15_000 < 0.003
    assert 0.004 < latencies.reserve < 0.030


def test_a_quiet_machine_needs_no_reserve() -> None:
    latencies = Latencies({1.0: 10.0})
    for _ in range(10):
        latencies.note(1.0, 0.013)
    for _ in range(5000):
        latencies.note(1.0, 0.010)
    assert latencies.reserve < 0.001


def test_time_between_runs_is_learned_apart_from_them() -> None:
    latencies = Latencies({0.5: 0.2, 1.0: 2.0})
    for _ in range(100):
        latencies.note(0.5, 0.0002, overhead=0.0005)
        latencies.note(1.0, 0.0020, overhead=0.0005)
    assert latencies.overhead == pytest.approx(0.0005, rel=0.05)
    assert latencies.run(0.5) == pytest.approx(0.0002, rel=0.05)
    assert latencies.expected(1.0, size=3) == pytest.approx(0.0065, rel=0.05)
    latencies.note(1.0, 0.0020, overhead=1.0)
    assert latencies.overhead < 0.001, "an interruption"
