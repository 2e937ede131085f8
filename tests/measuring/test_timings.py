"""Timing: networks take turns, and the fastest passes count."""

from __future__ import annotations

import pytest
import torch
from tiny_networks import tiny

import anywidth as aw
from anywidth.measuring import deployed_latency
from anywidth.measuring.deployed_latency import WARM_UP, Timing, time_in_turns


def test_networks_take_turns_after_they_are_warm() -> None:
    called: list[str] = []
    done: list[int] = []

    def one(name: str) -> float:
        called.append(name)
        return float(len(called))

    times = time_in_turns([lambda: one("a"), lambda: one("b")], lambda: done.append(1), repeats=3)
    warm = 2 * WARM_UP
    assert called[:warm] == ["a"] * WARM_UP + ["b"] * WARM_UP
    assert called[warm:] == ["a", "b"] * 3
    assert times == [[warm + 1, warm + 3, warm + 5], [warm + 2, warm + 4, warm + 6]]
    assert len(done) == 6


def test_a_disturbed_pass_does_not_count() -> None:
    times = [2.0, 2.2, 2.1, 50.0, 3.0, 4.0]
    assert Timing.of(times) == (pytest.approx(2.05), 2.0, 2.6)
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0)


@pytest.mark.parametrize("kind", ["extracted", "sliced"])
def test_pytorch_times_every_width_and_leaves_the_network_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without the packages, and as on a GPU; widths without statistics can be timed."""
    monkeypatch.setattr(deployed_latency, "_PACKAGES", ("no_such_package",))
    monkeypatch.setattr(deployed_latency, "_MOST_AT_ONCE", 3000)  # two groups
    if kind == "sliced":
        monkeypatch.setattr(deployed_latency, "_is_on_cpu", lambda model: False)
    model = tiny()
    aw.slimmable(model, None, aw.WidthRange(0.25, 1.0, 4), example_input=torch.randn(2, 1, 12, 12))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = aw.plan_of(model)
    configs = [plan.resolve(width) for width in (1.0, 0.5, 0.25)]
    found = deployed_latency.deployed_latencies(model, configs, progress=False)
    assert found.by == "PyTorch"
    assert "CPU" in found.on
    assert list(found.timings) == configs
    assert all(0 < time.fastest <= time.milliseconds for time in found.timings.values())
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
