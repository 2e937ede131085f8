"""Which widths a training step visits."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from command_line import environment
from tiny_networks import converted
from torch import nn

import anywidth as aw
from anywidth.training.sampling import Rule

STEPS = range(40)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return converted()


@pytest.fixture(scope="module")
def fine() -> nn.Module:
    """Wide enough for a continuous draw to hit many configurations."""
    network = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 128), nn.Linear(128, 4))
    widths = aw.WidthRange(0.25, 1.0, 1)
    return aw.slimmable(network, None, widths, example_input=torch.randn(2, 8))


def test_a_sandwich_has_both_ends_and_random_widths_between(fine: nn.Module) -> None:
    plan = aw.plan_of(fine)
    between = set()
    for step in STEPS:
        widths = aw.sample_widths(fine, step)
        assert len(widths) == 4
        assert widths[:2] == [plan.widest, plan.narrowest]
        between.update(widths[2:])
        for config in widths[2:]:
            plan.check(config)
            assert all(plan.narrowest[g] <= n <= plan.widest[g] for g, n in config.items())
    assert len(between) > 60


@pytest.mark.parametrize(
    ("rule", "ends"),
    [("random", ()), ("min+random", ("narrowest",)), ("max+random", ("widest",)),
     ("sandwich", ("widest", "narrowest"))],
)  # fmt: skip
def test_each_rule_has_the_ends_it_names(
    fine: nn.Module, rule: Rule, ends: tuple[str, ...]
) -> None:
    plan = aw.plan_of(fine)
    drawn = [aw.sample_widths(fine, step, aw.Sampling(rule, count=3)) for step in STEPS]
    assert all(len(widths) == 3 for widths in drawn)
    assert all(widths[: len(ends)] == [getattr(plan, end) for end in ends] for widths in drawn)
    rest = [config for widths in drawn for config in widths[len(ends) :]]
    assert len(set(rest)) > len(rest) // 2


def test_draws_cover_the_range_evenly(fine: nn.Module) -> None:
    group = next(iter(aw.plan_of(fine).elastic())).name
    sampling = aw.Sampling("random", count=1)
    sizes = [aw.sample_widths(fine, step, sampling)[0][group] for step in range(600)]
    quarters = [sum(64 + 48 * i <= size < 112 + 48 * i for size in sizes) for i in range(4)]
    assert all(110 < count < 190 for count in quarters), quarters


def test_log_uniform_draws_cover_every_doubling_evenly(fine: nn.Module) -> None:
    group = next(iter(aw.plan_of(fine).elastic())).name
    for nonuniform, lattice in itertools.product((False, True), (None, 60)):
        sampling = aw.Sampling("random", 1, nonuniform, lattice, density="log-uniform")
        sizes = [aw.sample_widths(fine, step, sampling)[0][group] for step in range(600)]
        assert all(64 <= size <= 256 for size in sizes)
        assert 240 < sum(size < 128 for size in sizes) < 360  # uniform: a third
    sandwich = aw.Sampling(density="log-uniform")
    plan = aw.plan_of(fine)
    assert aw.sample_widths(fine, 3, sandwich)[:2] == [plan.widest, plan.narrowest]
    assert aw.sample_widths(fine, 3, sandwich) == aw.sample_widths(plan, 3, sandwich)


@pytest.mark.parametrize(
    "options",
    [{"density": "narrow"}, {"rule": "fixed", "widths": (0.5,)}],
)
def test_a_density_that_means_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(aw.AnywidthError, match="density"):
        aw.Sampling(**{"density": "log-uniform", **options})


def test_uniform_draws_use_one_fraction_and_nonuniform_ones_do_not(fine: nn.Module) -> None:
    def shares(sampling: aw.Sampling) -> list[float]:
        found = []
        for step in STEPS:
            config = aw.sample_widths(fine, step, sampling)[-1]
            first, second = (config[g.name] / g.channels for g in aw.plan_of(fine).elastic())
            found.append(abs(first - second))
        return found

    assert max(shares(aw.Sampling())) < 0.01
    nonuniform = shares(aw.Sampling(nonuniform=True))
    assert sum(difference > 0.05 for difference in nonuniform) > 25


def test_nonuniform_configurations_are_drawn_once_and_reused(fine: nn.Module) -> None:
    sampling = aw.Sampling(nonuniform=True, lattice=30, seed=4)
    plan = aw.plan_of(fine)
    known = sampling.configurations(fine)
    assert known == sampling.configurations(plan)
    assert [plan.macs(config) for config in known] == sorted(plan.macs(c) for c in known)
    drawn = [c for step in range(60) for c in aw.sample_widths(fine, step, sampling)[2:]]
    assert set(drawn) <= set(known)
    assert len(set(drawn)) > 20
    assert drawn[:2] == aw.sample_widths(plan, 0, sampling)[2:]
    other = aw.Sampling(nonuniform=True, lattice=30, seed=5).configurations(fine)
    assert set(other) != set(known)


def test_nonuniform_configurations_go_through_every_width_of_a_group(fine: nn.Module) -> None:
    """Otherwise a channel count would be trained rarely, or never."""
    known = aw.Sampling(nonuniform=True, lattice=48).configurations(fine)
    for group in aw.plan_of(fine).elastic():
        shares = sorted(config[group.name] / group.channels for config in known)
        assert all(b - a < 0.04 for a, b in itertools.pairwise([0.25, *shares, 1.0]))


def test_configurations_need_a_lattice(fine: nn.Module) -> None:
    with pytest.raises(aw.AnywidthError, match="lattice"):
        aw.Sampling(nonuniform=True).configurations(fine)


def test_a_lattice_restricts_the_draws(fine: nn.Module) -> None:
    sampling = aw.Sampling(lattice=5)
    drawn = {c for step in range(100) for c in aw.sample_widths(fine, step, sampling)}
    assert drawn == set(aw.plan_of(fine).lattice(5))
    assert len(drawn) == 5


def test_a_plan_draws_what_its_network_draws(fine: nn.Module) -> None:
    for sampling in (None, aw.Sampling(lattice=5), aw.Sampling(nonuniform=True)):
        on_plan = aw.sample_widths(aw.plan_of(fine), 7, sampling)
        assert on_plan == aw.sample_widths(fine, 7, sampling)


def test_a_fixed_list_is_visited_widest_first_every_step(model: nn.Module) -> None:
    plan = aw.plan_of(model)
    sampling = aw.Sampling("fixed", widths=(0.25, 1.0, 0.5))
    for step in (0, 1, 99):
        widths = aw.sample_widths(model, step, sampling)
        assert widths == [plan.resolve(w) for w in (1.0, 0.5, 0.25)]
    assert aw.sample_widths(model, 3, aw.Sampling("fixed", widths=(0.5,))) == [plan.resolve(0.5)]


def test_draws_depend_on_seed_and_step_alone(fine: nn.Module) -> None:
    first = [aw.sample_widths(fine, step) for step in STEPS]
    random.seed(99)
    again = [aw.sample_widths(fine, step) for step in reversed(STEPS)]
    assert first == again[::-1]
    assert len({tuple(widths) for widths in first}) == len(first)
    other = [aw.sample_widths(fine, step, aw.Sampling(seed=1)) for step in STEPS]
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 3


_PRINT_DRAWS = """
import anywidth as aw
from tiny_networks import converted
model = converted()
for sampling in (aw.Sampling(seed=5), aw.Sampling(nonuniform=True), aw.Sampling(lattice=3)):
    for step in range(8):
        print(aw.sample_widths(model, step, sampling))
"""


def test_another_process_draws_the_same(model: nn.Module) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PRINT_DRAWS],
        env=environment(PYTHONHASHSEED="77"),
        capture_output=True,
        text=True,
        check=True,
    )
    samplings = (aw.Sampling(seed=5), aw.Sampling(nonuniform=True), aw.Sampling(lattice=3))
    here = [str(aw.sample_widths(model, step, s)) for s in samplings for step in range(8)]
    assert done.stdout.splitlines() == here


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rule": "biggest"}, "'biggest'"),
        ({"rule": "fixed"}, "widths="),
        ({"count": 1}, "at least 2"),
        ({"rule": "random", "count": 0}, "at least 1"),
        ({"lattice": 1}, "lattice"),
        ({"lattice": 2.5}, "2.5"),
        ({"lattice": "4"}, "'4'"),
        ({"count": 2.5}, "2.5"),
        ({"count": "4"}, "'4'"),
        ({"rule": "fixed", "widths": 0.5}, r"\[0.5\]"),
        ({"widths": (0.25, 1.0)}, "'sandwich'"),
        ({"lattice": 0, "nonuniform": True}, "lattice"),
    ],
)
def test_bad_choices_are_named(options: dict[str, object], word: str) -> None:
    with pytest.raises(aw.AnywidthError, match=word):
        aw.Sampling(**options)  # type: ignore[arg-type]


def test_a_fixed_width_outside_the_range_is_named(model: nn.Module) -> None:
    with pytest.raises(aw.AnywidthError, match=r"0\.1"):
        aw.sample_widths(model, 0, aw.Sampling("fixed", widths=(0.1,)))


@pytest.mark.parametrize("sampling", [4, "random", 0])
def test_what_is_no_sampling_is_named(model: nn.Module, sampling: Any) -> None:
    with pytest.raises(aw.AnywidthError, match="Sampling"):
        aw.sample_widths(model, 0, sampling)


def test_an_ordinary_network_is_refused() -> None:
    with pytest.raises(aw.AnywidthError, match="converted"):
        aw.sample_widths(nn.Linear(2, 2), 0)
