"""The plan: resolving widths, editing, printing, saving."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from agreement import assert_agrees
from torch import nn

import anywidth as aw


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 4, 1),
    )  # fmt: skip


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


@pytest.fixture
def plan(x: torch.Tensor) -> aw.Plan:
    return aw.plan(network(), x)


def test_groups_are_named_after_the_layer_that_makes_them(plan: aw.Plan) -> None:
    assert list(plan.groups) == ["0", "3", "6", "8"]
    assert plan.group("3").makers == ("3",)
    assert plan.group("3").readers == ("6",)
    assert "output" in str(plan.group("8").fixed)
    assert plan.elastic_layers() == (3, 4)


def test_resolve_takes_a_fraction_a_mapping_or_a_configuration(plan: aw.Plan) -> None:
    assert plan.resolve(0.5).to_json() == {"0": 8, "3": 16, "6": 32, "8": 4}
    assert plan.resolve({"3": 0.25}).to_json() == {"0": 16, "3": 8, "6": 64, "8": 4}
    half = plan.resolve(0.5)
    assert plan.resolve(half) is half
    assert (plan.full, plan.widest) == (plan.resolve(1.0), plan.resolve(1.0))
    assert plan.narrowest == plan.resolve(0.25)


def test_resolve_accepts_groups_in_another_order(plan: aw.Plan) -> None:
    shuffled = aw.ChannelConfig(tuple(reversed(plan.resolve(0.5).channels)))
    assert plan.resolve(shuffled) == plan.resolve(0.5)


def test_full_width_is_all_channels_whatever_the_divisor() -> None:
    model = nn.Sequential(nn.Conv2d(3, 58, 1), nn.ReLU(), nn.Conv2d(58, 4, 1))
    plan = aw.plan(model, torch.randn(2, 3, 4, 4))
    assert plan.resolve(1.0) == plan.full
    assert plan.resolve(0.99)["0"] == 56
    assert plan.full in plan.lattice()


def test_lattice_holds_every_uniform_configuration(plan: aw.Plan) -> None:
    lattice = plan.lattice()
    assert lattice[0] == plan.narrowest
    assert lattice[-1] == plan.widest
    seen = {plan.resolve(0.25 + 0.75 * i / 4000) for i in range(4001)}
    assert seen <= set(lattice)
    assert len(set(lattice)) == len(lattice)
    some = plan.lattice(4)
    assert (len(some), some[0], some[-1]) == (4, lattice[0], lattice[-1])


def test_distinct_widths_are_short_and_come_to_every_configuration(plan: aw.Plan) -> None:
    widths = plan.distinct_widths()
    assert [plan.resolve(width) for width in widths] == plan.lattice()
    assert (widths[0], widths[-1]) == (0.25, 1.0)
    assert widths == sorted(widths)
    for width in widths[1:-1]:
        places = len(str(width)) - len("0.")
        if places > 2:
            assert plan.resolve(round(width, places - 1)) != plan.resolve(width)
    plan.widths = aw.WidthRange(0.25, 1.0, 1)
    assert [plan.resolve(width) for width in plan.distinct_widths()] == plan.lattice()
    assert len(plan.distinct_widths()) > len(widths)
    # Ends that no short width is inside of.
    plan.widths = aw.WidthRange(0.333, 0.667, 1)
    assert [plan.resolve(width) for width in plan.distinct_widths()] == plan.lattice()


def test_pin(plan: aw.Plan) -> None:
    plan.pin("3", "wanted whole")
    assert plan.resolve(0.25)["3"] == 32
    assert plan.elastic_layers() == (2, 4)
    with pytest.raises(aw.AnywidthError, match="whole"):
        plan.check(plan.full.replace({"3": 8}))


def test_tie_follows_the_rounded_base(plan: aw.Plan) -> None:
    plan.tie("6", "3", 2)
    plan.tie("3", "0", 2)
    config = plan.resolve(0.6)
    assert (config["3"], config["6"]) == (2 * config["0"], 4 * config["0"])
    assert plan.root("6") == "0"
    assert [group.name for group in plan.elastic()] == ["0"]
    with pytest.raises(aw.AnywidthError, match="24"):
        plan.check(plan.resolve(0.5).replace({"3": 24}))


def test_pinning_the_base_of_a_tie_pins_what_follows(plan: aw.Plan) -> None:
    plan.tie("3", "0", 2)
    plan.pin("0")
    assert plan.resolve(0.25)["3"] == 32
    assert not plan.can_narrow("3")
    assert plan.elastic_layers() == (1, 4)


def test_tie_to_a_fixed_group_keeps_the_full_size(plan: aw.Plan) -> None:
    plan.tie("0", "8", 4)
    assert plan.resolve(0.25)["0"] == 16


def test_pin_of_a_tied_group_unties_it(plan: aw.Plan) -> None:
    plan.tie("3", "0", 2)
    plan.pin("3")
    assert plan.resolve(0.25).to_json() == {"0": 8, "3": 32, "6": 16, "8": 4}


def test_set_divisor(plan: aw.Plan) -> None:
    plan.set_divisor("3", 1)
    assert plan.resolve(0.53)["3"] == 17
    assert plan.resolve(0.53)["0"] == 8


def test_whole_numbers_of_numpy_are_numbers(plan: aw.Plan) -> None:
    """Searches draw them."""
    name = plan.elastic()[0].name
    plan.set_divisor(name, np.int64(4))
    config = plan.resolve(plan.full.replace({name: np.int64(8)}))
    assert json.loads(json.dumps(config.to_json())) == config.to_json()
    assert json.loads(json.dumps(plan.to_json()))
    assert aw.WidthRange(0.25, 1.0, np.int64(4)) == aw.WidthRange(0.25, 1.0, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("multiple", [1.0, "a", None, True])
def test_a_tie_by_no_whole_number_is_refused(plan: aw.Plan, multiple: Any) -> None:
    """A tie by 1.0 gave fractions of channels."""
    first, second = [group.name for group in plan.elastic()][:2]
    with pytest.raises(aw.AnywidthError, match=repr(multiple)):
        plan.tie(second, first, multiple)


def test_edits_that_cannot_be(plan: aw.Plan) -> None:
    plan.tie("3", "0", 2)
    with pytest.raises(aw.AnywidthError, match="itself"):
        plan.tie("0", "0", 1)
    with pytest.raises(aw.AnywidthError, match="3 times"):
        plan.tie("6", "3", 3)
    with pytest.raises(aw.AnywidthError, match="fixed"):
        plan.tie("8", "0", 1)
    with pytest.raises(aw.AnywidthError, match="'nowhere'"):
        plan.pin("nowhere")
    with pytest.raises(aw.AnywidthError, match="divisor"):
        plan.set_divisor("0", 0)
    with pytest.raises(aw.AnywidthError, match="'x'"):
        plan.group_of("x")


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan: None,
        lambda plan: plan.pin("3"),
        lambda plan: plan.tie("6", "3", 2),
        lambda plan: plan.set_divisor("6", 4),
        lambda plan: (plan.tie("3", "0", 2), plan.tie("6", "3", 2), plan.pin("0")),
        lambda plan: plan.tie("0", "8", 4),
    ],
    ids=["none", "pin", "tie", "divisor", "chain_to_pinned", "tie_to_fixed"],
)
def test_edited_plan_round_trips_and_converts_alike(plan: aw.Plan, x, edit) -> None:
    edit(plan)
    again = aw.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert str(again) == str(plan)
    first, second = network(), network()
    second.load_state_dict(first.state_dict())
    aw.slimmable(first, plan, strict=True, allow_fixed=True)
    aw.slimmable(second, again, strict=True, allow_fixed=True)
    assert aw.plan_of(first) == aw.plan_of(second)
    assert_agrees(first, x)
    for width in (0.25, 0.6):
        assert aw.macs(first, width) == aw.macs(second, width) == aw.macs(plan, width)
        with aw.at_width(first.train(), width), aw.at_width(second.train(), width):
            assert torch.equal(first(x), second(x))


def test_converting_leaves_the_given_plan_alone(plan: aw.Plan) -> None:
    before = plan.copy()
    aw.slimmable(network(), plan, aw.WidthRange(0.5, 1.0, 4))
    assert plan == before


def test_the_plan_of_a_converted_network_is_not_edited(plan: aw.Plan) -> None:
    """Widths it has been set to before would be other channels than those to come."""
    model = aw.slimmable(network(), plan)
    for used in (aw.plan_of(model), aw.plan_of(copy.deepcopy(model))):
        for edit in (
            lambda used=used: used.pin("0"),
            lambda used=used: used.tie("3", "0", 2),
            lambda used=used: used.set_divisor("0", 2),
        ):
            with pytest.raises(aw.AnywidthError, match="copy"):
                edit()
    edited = aw.plan_of(model).copy()
    edited.pin("0")
    assert aw.plan_of(aw.slimmable(network(), edited)).narrowest["0"] == 16
    plan.pin("3")


def test_printed_plan_says_all(plan: aw.Plan) -> None:
    plan.tie("3", "0", 2)
    plan.set_divisor("6", 4)
    text = str(plan)
    for part in ("3 of 4", "2 x 0", "divisor 4", "fixed: is an output of the model"):
        assert part in text
    assert f"1.0    {aw.macs(plan, 1.0):,}" in text
    assert f"0.25   {aw.macs(plan, 0.25):,}" in text


def test_a_convolution_by_a_parameter_is_named_in_the_print() -> None:
    class Filtered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = nn.Conv2d(3, 8, 3)
            self.filters = nn.Parameter(torch.randn(8, 8, 3, 3))
            self.read = nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.read(nn.functional.conv2d(self.made(x), self.filters * 2))

    text = str(aw.plan(Filtered(), torch.randn(2, 3, 8, 8)))
    assert "the model itself" in text
    assert ", \n" not in text.replace("  ", "\n")


@pytest.mark.parametrize("data", [None, [], {}, {"version": 99}, {"version": 1, "groups": 3}])
def test_damaged_json(data) -> None:
    with pytest.raises(aw.AnywidthError, match="plan"):
        aw.Plan.from_json(data)


def test_a_width_for_a_group_that_cannot_have_one_is_refused(x: torch.Tensor) -> None:
    plan = aw.plan(network(), x)
    plan.tie("3", "0", 2)
    plan.pin("6", "read by other code")
    with pytest.raises(aw.AnywidthError, match="tied"):
        plan.resolve({"3": 0.5})
    with pytest.raises(aw.AnywidthError, match="read by other code"):
        plan.resolve({"6": 0.5})
    assert plan.resolve({"0": 0.5, "6": 1.0}).to_json() == {"0": 8, "3": 16, "6": 64, "8": 4}
