"""Multiply-adds, parameters and latency of a width."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from agreement import configurations, convert
from counting import counted
from layer_networks import NETWORKS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import anywidth as aw
from anywidth.slimming.extraction import extract_quietly

REFERENCE = Path(__file__).parents[1] / "reference"


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


class NoOperations(TorchDispatchMode):
    def __torch_dispatch__(self, operation: Any, *rest: Any) -> Any:
        raise AssertionError(f"{operation} was run")


def test_counting_and_setting_run_nothing() -> None:
    """Also for a configuration never seen before; `benchmarks/slicing.py` has the times."""
    model = aw.models.mobilenet_v1()
    aw.slimmable(model, aw.plan(model, torch.randn(2, 3, 224, 224)), verified=False)
    with NoOperations():
        config = aw.plan_of(model).resolve({"features.6.1.0": 0.4})
        assert 0 < aw.macs(model, config) < aw.macs(model, 1.0)
        assert 0 < aw.parameter_count(model, config) < aw.parameter_count(model, 1.0)
        aw.set_width(model, config)
        assert model.features[6][1][0].out_channels == 208
        with pytest.raises(AssertionError, match="run"):
            model.features[6][1][0].weight + 1


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
    assert aw.plan_of(model).elastic_layers() == (1, 2)
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


def test_an_einsum_that_sums_nothing_is_not_counted() -> None:
    """Torch multiplies entry by entry then, which is not counted elsewhere either."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
            self.rates = nn.Parameter(torch.randn(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            states = torch.einsum("bd,dn->bdn", y, self.rates).exp()
            return self.head(torch.einsum("bdn,bd,bn->bd", states, y, states.mean(1)))

    x = torch.randn(2, 6)
    model = convert(Outer(), x)
    for config in configurations(model):
        assert aw.macs(model, config) == counted(extract_quietly(model, config), x[:1])


@pytest.mark.parametrize("examples", [2, 3, 7, 16])
def test_heads_merged_with_the_batch_are_those_of_one_example(examples: int) -> None:
    """nn.MultiheadAttention multiplies all heads of all examples at once."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(6, 32), nn.Linear(32, 3)
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            return self.head(self.attention(y, y, y)[0])

    x = torch.randn(examples, 5, 6)
    model = convert(Attending(), x)
    for config in configurations(model):
        assert aw.macs(model, config) == counted(extract_quietly(model, config), x[:1])


@pytest.mark.parametrize("examples", [2, 3])
def test_queries_learned_for_a_batch_in_the_second_place(examples: int) -> None:
    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(5, 16))
            self.inner, self.head = nn.Linear(16, 8), nn.Linear(8, 4)
            self.style = nn.Linear(6, 8)

        def forward(self, z: Tensor) -> Tensor:
            y = self.inner(self.queries[:, None].expand(-1, z.shape[0], -1))
            return self.head(y + self.style(z)).transpose(0, 1)

    plan = aw.plan(Queries(), torch.randn(examples, 6))
    assert aw.macs(plan, 1.0) == 5 * (16 * 8 + 8 * 4) + 6 * 8


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


def test_latency() -> None:
    model = convert(NETWORKS["batch_norm2d"]()[0], torch.randn(2, 3, 8, 8)).train()
    for options in ({}, {"extracted": True}, {"fold": True}, {"input_shape": (3, 16, 16)}):
        measured = aw.latency(model, 0.5, batch_size=2, repeats=3, warmup=1, **options)
        assert isinstance(measured, aw.Latency)
        assert 0 < measured.fastest <= measured.median
        assert measured.repeats == 3
    assert all(module.training for module in model.modules())
    assert model[0].out_channels == 16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_latency_of_a_network_that_was_cast(dtype: torch.dtype) -> None:
    model = convert(NETWORKS["batch_norm2d"]()[0], torch.randn(2, 3, 8, 8)).to(dtype)
    for fold in (False, True):
        assert aw.latency(model, 0.5, repeats=1, warmup=0, fold=fold).median > 0


def test_latency_draws_none_of_the_callers_random_numbers() -> None:
    model = convert(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(2, 4))
    before = torch.get_rng_state()
    aw.latency(model, 0.5, repeats=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_latency_of_words_of_another_length() -> None:
    lengths = []
    model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    convert(model, torch.randint(9, (2, 5)))
    model.register_forward_pre_hook(lambda _, inputs: lengths.append(tuple(inputs[0].shape)))
    aw.latency(model, 0.5, batch_size=3, repeats=1, warmup=0, input_shape=(7,))
    aw.latency(model, 0.5, batch_size=3, repeats=1, warmup=0)
    assert lengths == [(3, 7), (3, 5)]


class Factor(NamedTuple):
    by: Tensor


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, factor: Any) -> Tensor:
        if isinstance(factor, Factor):
            factor = factor.by
        return self.second(self.first(x) * (factor[0] if isinstance(factor, list) else factor))


def test_arguments_that_are_no_tensors_are_remembered_or_asked_for() -> None:
    x = torch.randn(2, 3, 8, 8)
    plan = aw.Plan.from_json(json.loads(json.dumps(aw.plan(Scaled(), (x, 3)).to_json())))
    model = aw.slimmable(Scaled(), plan)
    assert aw.latency(model, 0.5, repeats=1).median > 0
    plan = aw.plan(Scaled(), (x, [torch.ones(2, 1, 1, 1)]))
    plan = aw.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert aw.latency(aw.slimmable(Scaled(), plan), 0.5, repeats=1, batch_size=3).median > 0
    by = Factor(torch.ones(1))
    plan = aw.plan(Scaled(), (x, by))
    aw.slimmable(Scaled(), plan)  # verified with the plan's own example, which a file does not keep
    plan = aw.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    with pytest.raises(aw.AnywidthError, match="argument 2"):
        aw.slimmable(Scaled(), plan)
    aw.slimmable(Scaled(), plan, example_input=(x, by))


@pytest.mark.parametrize(
    ("divisor", "channels"),
    [(4, [4, 8, 12, 16]), (8, [8, 8, 16, 16]), (16, [16] * 4), (17, [4, 8, 12, 16])],
)
def test_a_divisor_larger_than_a_group_does_not_count(divisor: int, channels: list[int]) -> None:
    group = aw.ChannelGroup("conv", 16)
    assert [group.round(16 * width, divisor) for width in (0.25, 0.5, 0.75, 1.0)] == channels
    heads = aw.ChannelGroup("attention", 16, unit=4)
    assert heads.round(9, 17) == heads.round(9, 4) == 12
