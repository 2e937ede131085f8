"""A latency table predicts what a configuration takes, and knows what it was measured with."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import anywidth_runtime
import pytest
import torch
from torch import nn

import anywidth as aw
from anywidth.deploying.bundling import write_probes
from anywidth.searching import finalists
from anywidth.searching.choices import Choices
from anywidth.searching.finalists import spread_uniform, uniform_within
from anywidth.searching.latency_table import fitted_table, latency_devices
from anywidth.searching.probes import probe_configs


class Slow(nn.Module):
    """A layer whose work grows with its channels much faster than anything around it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inside = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inside(x))


def unconverted() -> nn.Module:
    return nn.Sequential(
        Slow(3, 128), Slow(128, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 4)
    )


def network(pixels: int = 24) -> nn.Module:
    example = torch.randn(2, 3, pixels, pixels)
    return aw.slimmable(unconverted(), None, aw.WidthRange(0.25, 1.0, 8), example_input=example)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return network()


@pytest.fixture(scope="module")
def table(model: nn.Module) -> aw.LatencyTable:
    return aw.measure_latencies(model, networks=8, progress=False)


def true_time(model: nn.Module, config: aw.ChannelConfig) -> float:
    """A device on which the second layer is twice as slow as the first, per multiply-add."""
    first, second = config["0.inside"], config["1.inside"]
    return 0.05 + 1e-4 * (first + second) + 2e-6 * (3 * first) + 4e-6 * first * second


def test_wider_is_predicted_to_take_longer(model: nn.Module, table: aw.LatencyTable) -> None:
    plan = aw.plan_of(model)
    assert table.predict(plan.resolve(0.25)) < table.predict(plan.resolve(1.0))
    assert table.layers.keys() == {"0.inside", "1.inside", "4"}
    assert table.error >= 0


def test_a_device_is_predicted_within_ten_percent(model: nn.Module) -> None:
    plan = aw.plan_of(model)
    times = {config: true_time(model, config) for config in probe_configs(plan)}
    table = fitted_table(plan, times, "abacus")
    chance = random.Random(9)
    groups = [group.name for group in plan.elastic()]
    for _ in range(20):
        config = plan.resolve({name: chance.choice((0.25, 0.5, 1.0)) for name in groups})
        assert table.predict(config) == pytest.approx(true_time(model, config), rel=0.1)


def blocked_time(model: nn.Module, config: aw.ChannelConfig) -> float:
    """A device whose kernels take eight channels at a time: other numbers are slow."""
    slow = sum(0.02 + 3e-4 * config[name] for name in config if config[name] % 8)
    return true_time(model, config) + slow


def network_by_two(low: float) -> nn.Module:
    """Counts that are multiples of eight, and others."""
    widths = aw.WidthRange(low, 1.0, 2)
    return aw.slimmable(unconverted(), None, widths, example_input=torch.randn(2, 3, 24, 24))


@pytest.fixture(scope="module")
def by_two() -> nn.Module:
    return network_by_two(0.25)


def test_blocks_of_channels_are_found_out(by_two: nn.Module) -> None:
    plan = aw.plan_of(by_two)
    times = {config: blocked_time(by_two, config) for config in probe_configs(plan)}
    table = fitted_table(plan, times, "abacus")
    assert table.block == 8
    assert table.error < 0.1
    chance = random.Random(9)
    for low, high, step in ((32, 128, 8), (34, 127, 2)):
        for _ in range(20):
            counts = {name: chance.randrange(low, high, step) for name in ("0.inside", "1.inside")}
            config = plan.full.replace(counts)
            assert table.predict(config) == pytest.approx(blocked_time(by_two, config), rel=0.15)


def test_a_search_finds_counts_that_are_fast(by_two: nn.Module) -> None:
    """One count narrower is slower there, which must not end the way."""
    plan = aw.plan_of(by_two)
    times = {config: blocked_time(by_two, config) for config in probe_configs(plan)}
    table = fitted_table(plan, times, "abacus")
    for method in ("greedy", "evolution"):
        result = aw.search(by_two, loves_wide, budget_between(by_two, table), latencies=table,
                           method=method, population=6, generations=2, progress=False)  # fmt: skip
        found = result.found[0]
        assert [found.best.channels[name] % 8 for name in ("0.inside", "1.inside")] == [0, 0]


def test_the_widest_uniform_width_counts_though_narrower_ones_take_longer(
    by_two: nn.Module,
) -> None:
    plan = aw.plan_of(by_two)
    target = blocked_time(by_two, plan.widest)
    assert any(blocked_time(by_two, one) > target for one in plan.lattice())
    cost = partial(blocked_time, by_two)
    assert uniform_within(plan, cost, target) == plan.widest
    shown = spread_uniform(plan, cost, 0.0)
    assert all(one["0.inside"] % 8 == 0 for one in shown)
    assert [cost(one) for one in shown] == sorted(map(cost, shown))


def test_the_narrowest_network_need_not_be_the_cheapest() -> None:
    """At 0.27 of its channels, 34, it takes longer than at 40."""
    model = network_by_two(0.27)
    cost = partial(blocked_time, model)
    choices = Choices(aw.plan_of(model), cost)
    assert choices.narrowest["0.inside"] == 34
    cheapest = choices.cheapest()
    assert [cheapest[name] for name in choices.counts] == [40, 40]
    found = choices.fitted(choices.widest, cost(cheapest), random.Random(0))
    assert found == cheapest


def test_kept_in_a_file(model: nn.Module, table: aw.LatencyTable, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table.save(path)
    read = aw.LatencyTable.load(path, model)
    config = aw.plan_of(model).resolve(0.5)
    assert read.predict(config) == table.predict(config)


def test_other_networks_devices_and_files_are_refused(
    model: nn.Module, table: aw.LatencyTable, tmp_path: Path
) -> None:
    path = tmp_path / "table.json"
    table.save(path)
    with pytest.raises(aw.AnywidthError, match="another network") as refusal:
        aw.LatencyTable.load(path, network(pixels=32))
    assert "not a latency table" not in str(refusal.value)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "device": "abacus"}))
    with pytest.raises(aw.AnywidthError, match="abacus"):
        aw.LatencyTable.load(path, model)
    assert aw.LatencyTable.load(path, model, other_device=True).device == "abacus"
    for damage in ({"constant": "x"}, {"layers": {"4": [1.0, 2.0]}}, {"version": 1}, {"block": 3},
                   {"error": float("nan")}):  # fmt: skip
        path.write_text(json.dumps({**data, **damage}))
        with pytest.raises(aw.AnywidthError, match="table"):
            aw.LatencyTable.load(path, model)


def test_times_of_another_machine_are_brought_back(model: nn.Module, tmp_path: Path) -> None:
    """Probes are exported, timed by the runtime alone, and their times read here."""
    bundle = tmp_path / "probes.anywidth"
    write_probes(model, bundle, networks=8)
    anywidth_runtime.open(bundle).measure(repeats=2, progress=False)
    path = tmp_path / "probes.anywidth.latency.json"
    table = aw.LatencyTable.load(path, model)
    plan = aw.plan_of(model)
    assert table.predict(plan.resolve(0.25)) < table.predict(plan.resolve(1.0))
    with pytest.raises(aw.AnywidthError, match="another network"):
        aw.LatencyTable.load(path, network(pixels=32))
    data = json.loads(path.read_text())
    data["machine"]["processor"] = "abacus"
    path.write_text(json.dumps(data))
    with pytest.raises(aw.AnywidthError, match="abacus"):
        aw.LatencyTable.load(path, model)
    there = aw.LatencyTable.load(path, model, other_device=True)
    found = aw.search(model, loves_wide, budget_between(model, there), latencies=there,
                      progress=False).found[0]  # fmt: skip
    assert not found.is_measured
    assert found.best.cost == there.predict(found.best.channels)
    data["milliseconds"] = [["probe 7000000 of " + table.network, 1.0]]
    path.write_text(json.dumps(data))
    with pytest.raises(aw.AnywidthError, match="range"):
        aw.LatencyTable.load(path, model)


def test_too_few_networks_are_named(model: nn.Module) -> None:
    with pytest.raises(aw.AnywidthError, match="networks"):
        aw.measure_latencies(model, networks=2)


def loves_wide(model: nn.Module) -> dict[str, float]:
    return {"loss": -float(sum(p.numel() for p in model[1].inside.parameters()))}


def budget_between(model: nn.Module, table: aw.LatencyTable) -> aw.Budget:
    plan = aw.plan_of(model)
    ends = [table.predict(plan.resolve(width)) for width in (0.25, 1.0)]
    return aw.Budget("milliseconds", sum(ends) / 2)


def test_a_budget_in_milliseconds(model: nn.Module, table: aw.LatencyTable) -> None:
    images = torch.randn(4, 3, 24, 24)
    result = aw.search(
        model, loves_wide, budget_between(model, table), latencies=table, progress=False
    )
    found = result.found[0]
    assert found.best.cost > 0
    assert found.is_measured
    assert aw.extract(model, found.best.channels)(images).shape == (4, 4)


def test_a_device_less_busy_than_before_lets_nothing_slower_through(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All take a third of what the table predicts, so the budget alone would refuse nothing."""
    plan = aw.plan_of(model)
    times = {config: true_time(model, config) for config in probe_configs(plan)}
    table = fitted_table(plan, times, latency_devices(model)[0])
    uniform = set(plan.lattice())

    def measured(model: nn.Module, configs: list[aw.ChannelConfig], table: aw.LatencyTable) -> dict:
        return {c: table.predict(c) / 3 * (1.0 if c in uniform else 1.2) for c in configs}

    def wide_at_the_end(model: nn.Module) -> dict[str, float]:
        return {"loss": -float(model[1].inside.weight.shape[0])}

    monkeypatch.setattr(finalists, "measured_finalists", measured)
    budget = budget_between(model, table)
    found = aw.search(model, wide_at_the_end, budget, latencies=table, progress=False).found[0]
    assert found.is_measured
    assert found.is_uniform
