"""How much each width of a step counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recorded_passes import RecordedPasses
from tiny_networks import converted, images_and_labels
from torch import Tensor

import anywidth as aw
from anywidth.training.engine.graphs import GraphEngine
from anywidth.training.sampling import checked_weights, width_weights


@pytest.fixture(scope="module")
def configs() -> list[aw.ChannelConfig]:
    plan = aw.plan_of(converted())
    return [plan.resolve(width) for width in (1.0, 0.25, 0.5, 0.75)]


def test_named_rules(configs: list[aw.ChannelConfig]) -> None:
    assert width_weights("paper", configs) == [1, 1, 1, 1]
    assert width_weights("balanced", configs) == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    assert width_weights("balanced", configs[:1]) == [1]


def test_rules_of_ones_own(configs: list[aw.ChannelConfig]) -> None:
    assert width_weights([2, 1, 0, 1], configs) == [2, 1, 0, 1]

    def by_channels(config: aw.ChannelConfig, position: int, number: int) -> float:
        return config["0"] / 16 + position / number

    assert width_weights(by_channels, configs) == [1.0, 0.25 + 0.25, 0.5 + 0.5, 0.75 + 0.75]


def test_weights_may_be_an_array() -> None:
    found = [checked_weights(one, aw.Sampling()) for one in (np.ones(4), torch.ones(4))]
    assert found == [[1, 1, 1, 1]] * 2


@pytest.mark.parametrize(
    ("weights", "word"),
    [([1, 1], "4"), ([1, -1, 1, 1], "-1"), ([1, math.nan, 1, 1], "nan"), ([0, 0, 0, 0], "nothing"),
     (lambda config, position, number: math.inf, "inf"), ([1, "2", 1, 1], "'2'")],
)  # fmt: skip
def test_bad_weights_are_named(configs: list[aw.ChannelConfig], weights, word: str) -> None:
    with pytest.raises(aw.AnywidthError, match=word):
        width_weights(weights, configs)


@pytest.mark.parametrize("weights", ["sum", 3, True])
def test_what_is_no_rule_is_named(weights) -> None:
    with pytest.raises(aw.AnywidthError, match="weights"):
        checked_weights(weights, aw.Sampling())


@pytest.mark.parametrize("rule", ["random", "min+random"])
def test_balance_needs_the_widest_width(rule) -> None:
    model = converted()
    with pytest.raises(aw.AnywidthError, match="widest"):
        aw.SandwichStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            F.cross_entropy,
            None,
            aw.Sampling(rule),
            weights="balanced",
        )


def gradients(weights, by_graphs: bool = False, steps: int = 1) -> list[Tensor]:
    """What the last of some steps leaves in the parameters."""
    torch.manual_seed(0)
    model = converted().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, weights=weights)
    if by_graphs:
        passes = RecordedPasses(False)
        step.engine = GraphEngine(model, step.parameters, step.engine.objective, capture=passes)
    for number in range(steps):
        images, labels = images_and_labels(16, number)
        step(images.double(), labels)
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_gradients_are_weighed() -> None:
    alone = [gradients([float(i == position) for i in range(4)]) for position in range(4)]
    for weights in ("paper", "balanced", [2, 1, 0.5, 0]):
        given = {"paper": [1] * 4, "balanced": [1, 1 / 3, 1 / 3, 1 / 3]}
        factors = given[weights] if isinstance(weights, str) else weights
        for index, found in enumerate(gradients(weights)):
            parts = [factor * one[index] for factor, one in zip(factors, alone, strict=True)]
            torch.testing.assert_close(found, sum(parts))


def test_both_engines_weigh_alike() -> None:
    def shrinking(config: aw.ChannelConfig, position: int, number: int) -> float:
        return config["0"] / 16

    for weights in ("paper", "balanced", shrinking):
        pairs = zip(gradients(weights, steps=6), gradients(weights, True, steps=6), strict=True)
        for eager, graphs in pairs:
            torch.testing.assert_close(graphs, eager)


def test_losses_are_reported_unweighed() -> None:
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    images, labels = images_and_labels(16)
    paper, balanced = (
        aw.SandwichStep(model, optimizer, F.cross_entropy, weights=rule)(images, labels).losses
        for rule in ("paper", "balanced")
    )
    torch.testing.assert_close(balanced, paper)


def test_a_step_refuses_bad_weights() -> None:
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(aw.AnywidthError, match="sum"):
        aw.SandwichStep(model, optimizer, F.cross_entropy, weights="sum")
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, weights=[1, 1])
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(aw.AnywidthError, match="2 weights"):
        step(*images_and_labels(16))
    assert all(map(torch.equal, before, model.parameters()))


def test_weights_are_balanced_unless_the_widest_may_be_left_out() -> None:
    assert checked_weights(None, aw.Sampling()) == "balanced"
    assert checked_weights(None, aw.Sampling("fixed", widths=(0.25, 1.0))) == "balanced"
    assert checked_weights(None, aw.Sampling("random")) == "paper"
    model = converted()
    step = aw.SandwichStep(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy)
    assert step.weights == "balanced"
