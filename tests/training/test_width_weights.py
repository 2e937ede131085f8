"""How much each width of a step counts."""

from __future__ import annotations

import math

import pytest
from tiny_networks import converted

import anywidth as aw
from anywidth.training.width_weights import check_weights, width_weights


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


@pytest.mark.parametrize(
    ("weights", "word"),
    [([1, 1], "4"), ([1, -1, 1, 1], "-1"), ([1, math.nan, 1, 1], "nan"), ([0, 0, 0, 0], "nothing"),
     (lambda config, position, number: math.inf, "inf"), ([1, "2", 1, 1], "'2'")],
)  # fmt: skip
def test_bad_weights_are_named(configs: list[aw.ChannelConfig], weights, word: str) -> None:
    with pytest.raises(aw.AnywidthError, match=word):
        width_weights(weights, configs)


@pytest.mark.parametrize("weights", ["sum", 3, None])
def test_what_is_no_rule_is_named(weights) -> None:
    with pytest.raises(aw.AnywidthError, match="weights"):
        check_weights(weights)
