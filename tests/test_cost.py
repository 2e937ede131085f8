"""Multiply-adds, parameters and latency of a width."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import configurations, convert
from test_layers import NETWORKS
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import anywidth as aw
from anywidth.extraction import extract_quietly

REFERENCE = Path(__file__).parent / "reference"


def published(version: int) -> list[tuple[float, int]]:
    with open(REFERENCE / f"us_mobilenet_v{version}_imagenet.csv", newline="") as file:
        return [(float(row["width"]), int(row["macs"])) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("version", "rows"), [(1, 31), (2, 27)])
def test_published_spectra_are_met_to_the_last_multiply_add(version: int, rows: int) -> None:
    with torch.device("meta"):
        model = getattr(aw.models, f"mobilenet_v{version}")()
        plan = aw.plan(model, torch.empty(2, 3, 224, 224))
    figures = published(version)
    plan.widths = aw.WidthRange(min(width for width, _ in figures), 1.0)
    assert len(figures) == rows
    assert {width: aw.macs(plan, width) for width, _ in figures} == dict(figures)


@pytest.fixture(scope="module")
def mobilenet() -> nn.Module:
    model = aw.models.mobilenet_v1()
    return aw.slimmable(model, aw.plan(model, torch.randn(2, 3, 224, 224)), verified=False)


def test_counting_and_setting_are_fast(mobilenet: nn.Module) -> None:
    """Under 5 ms and 1 ms, also for configurations never seen before."""
    plan = aw.plan_of(mobilenet)
    fresh = [plan.resolve({"features.6.1.0": 0.25 + 0.01 * i}) for i in range(60)]
    for use, limit in ((aw.macs, 5e-3), (aw.set_width, 1e-3)):
        times = []
        for config in dict.fromkeys(fresh):
            start = time.perf_counter()
            use(mobilenet, config)
            times.append(time.perf_counter() - start)
        assert sorted(times)[len(times) // 2] < limit
    aw.set_width(mobilenet, 1.0)


def counted(model: nn.Module, *inputs: Tensor) -> int:
    """Half of torch's count, with attention as the products that it counts."""
    counter = FlopCounterMode(display=False)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model.eval()(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("name", NETWORKS)
def test_multiply_adds_are_half_of_torch_flops(name: str) -> None:
    model, shape = NETWORKS[name]()
    x = torch.randn(shape)
    convert(model, x)
    for config in configurations(model):
        small = extract_quietly(model, config)
        assert aw.macs(model, config) == counted(small, x[:1]), config
        assert aw.parameter_count(model, config) == sum(p.numel() for p in small.parameters())


def test_einsum_over_several_axes() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 1)
            self.weight = nn.Parameter(torch.randn(16, 4, 4, 5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bchw,chwo->bo", self.stem(x), self.weight)

    x = torch.randn(2, 3, 4, 4)
    model = convert(Summed(), x)
    assert aw.plan_of(model).elastic_layers() == (1, 1)
    for config in configurations(model):
        assert aw.macs(model, config) == counted(extract_quietly(model, config), x[:1])


def test_einsum_of_three_is_counted_as_torch_works_it_out() -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 16)
            self.down = nn.Parameter(torch.randn(16, 4))
            self.up = nn.Parameter(torch.randn(4, 5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,ir,ro->bo", self.stem(x), self.down, self.up)

    x = torch.randn(2, 6)
    model = convert(LowRank(), x)
    for config in configurations(model):
        assert aw.macs(model, config) == counted(extract_quietly(model, config), x[:1])


@pytest.mark.parametrize("examples", [2, 16])
def test_what_is_learned_counts_once_for_each_example_it_is_expanded_to(examples: int) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.constant = nn.Parameter(torch.randn(1, 8, 4, 4))
            self.conv, self.style = nn.Conv2d(8, 16, 1), nn.Linear(6, 16)
            self.head = nn.Conv2d(16, 3, 1)

        def forward(self, z: Tensor) -> Tensor:
            y = self.conv(self.constant.expand(z.shape[0], -1, -1, -1))
            return self.head(y * self.style(z)[:, :, None, None])

    plan = aw.plan(Constant(), torch.randn(examples, 6))
    assert aw.macs(plan, 1.0) == 16 * (8 * 16 + 16 * 3) + 6 * 16


def test_auxiliary_heads_are_not_counted_but_narrow() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.side = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 8, 1)
            self.side_head, self.head = nn.Conv2d(8, 4, 1), nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor):
            y = self.stem(x)
            return (self.head(y), self.side_head(self.side(y))) if self.training else self.head(y)

    x = torch.randn(2, 3, 4, 4)
    model = convert(Auxiliary(), x)
    assert aw.plan_of(model).elastic_layers() == (2, 4)
    small = extract_quietly(model, 0.5)
    assert aw.macs(model, 0.5) == counted(small, x[:1])
    assert small.side.weight.shape[:2] == (4, 8)
    assert [tuple(y.shape) for y in small.train()(x)] == [(2, 4, 4, 4)] * 2


def test_latency(mobilenet: nn.Module) -> None:
    model = convert(NETWORKS["batch_norm2d"]()[0], torch.randn(2, 3, 8, 8)).train()
    for options in ({}, {"extracted": True}, {"fold": True}, {"input_shape": (3, 16, 16)}):
        measured = aw.latency(model, 0.5, batch_size=2, repeats=3, warmup=1, **options)
        assert isinstance(measured, aw.Latency)
        assert 0 < measured.fastest <= measured.median
        assert measured.repeats == 3
    assert all(module.training for module in model.modules())
    assert model[0].out_channels == 16


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, factor: Any) -> Tensor:
        return self.second(self.first(x) * (factor[0] if isinstance(factor, list) else factor))


def test_arguments_that_are_no_tensors_are_remembered_or_asked_for() -> None:
    x = torch.randn(2, 3, 8, 8)
    plan = aw.Plan.from_json(json.loads(json.dumps(aw.plan(Scaled(), (x, 3)).to_json())))
    model = aw.slimmable(Scaled(), plan)
    assert aw.latency(model, 0.5, repeats=1).median > 0
    plan = aw.plan(Scaled(), (x, [torch.ones(1)]))
    with pytest.raises(aw.AnywidthError, match=r"argument 2 of Scaled was a list .*example_input"):
        aw.slimmable(Scaled(), plan)
    aw.slimmable(Scaled(), plan, example_input=(x, [torch.ones(1)]))


@pytest.mark.parametrize(
    ("divisor", "channels"),
    [(4, [4, 8, 12, 16]), (8, [8, 8, 16, 16]), (16, [16] * 4), (17, [4, 8, 12, 16])],
)
def test_a_divisor_larger_than_a_group_does_not_count(divisor: int, channels: list[int]) -> None:
    group = aw.ChannelGroup("conv", 16)
    assert [group.round(16 * width, divisor) for width in (0.25, 0.5, 0.75, 1.0)] == channels
    heads = aw.ChannelGroup("attention", 16, unit=4)
    assert heads.round(9, 17) == heads.round(9, 4) == 12
