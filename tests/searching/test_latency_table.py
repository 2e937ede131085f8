"""A latency table foretells what a configuration takes, and knows what it was measured with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import anywidth as aw


class Slow(nn.Module):
    """A layer whose work grows with its channels much faster than anything around it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inside = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inside(x))


def network(pixels: int = 24) -> nn.Module:
    model = nn.Sequential(
        Slow(3, 128), Slow(128, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 4)
    )
    example = torch.randn(2, 3, pixels, pixels)
    return aw.slimmable(model, None, aw.WidthRange(0.25, 1.0, 8), example_input=example)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return network()


@pytest.fixture(scope="module")
def table(model: nn.Module) -> aw.LatencyTable:
    return aw.measure_latencies(model, networks=15, passes=4, progress=False)


def test_wider_is_foretold_to_take_longer(model: nn.Module, table: aw.LatencyTable) -> None:
    plan = aw.plan_of(model)
    assert table.predict(plan.resolve(0.25)) < table.predict(plan.resolve(1.0))
    assert table.layers.keys() == {"0.inside", "1.inside", "4"}
    assert table.error >= 0


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
    with pytest.raises(aw.AnywidthError, match="network"):
        aw.LatencyTable.load(path, network(pixels=32))
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "device": "abacus"}))
    with pytest.raises(aw.AnywidthError, match="abacus"):
        aw.LatencyTable.load(path, model)
    path.write_text(json.dumps({**data, "remainder": ["x"]}))
    with pytest.raises(aw.AnywidthError, match="table"):
        aw.LatencyTable.load(path, model)


def test_too_few_networks_are_named(model: nn.Module) -> None:
    with pytest.raises(aw.AnywidthError, match="networks"):
        aw.measure_latencies(model, networks=2)


def test_a_budget_in_milliseconds(model: nn.Module, table: aw.LatencyTable) -> None:
    plan = aw.plan_of(model)
    budget = aw.Budget("milliseconds", 0.5 * (table.predict(plan.resolve(0.25)) + table.predict(
        plan.resolve(1.0))))  # fmt: skip

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"loss": -float(sum(p.numel() for p in model[1].inside.parameters()))}

    images = torch.randn(4, 3, 24, 24)
    result = aw.search(model, evaluate, budget, latencies=table, progress=False)
    found = result.found[0]
    assert found.best.cost > 0
    assert aw.extract(model, found.best.channels)(images).shape == (4, 4)
