"""Plan files that anyone may have changed: refused with one sentence, or the same plan."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import pytest
import torch
from mutations import mutated, refusal
from torch import Tensor, nn

import anywidth as aw

X = torch.randn(2, 3, 4, 4)


class Mixed(nn.Module):
    """A norm to fold, channels in groups, heads, and a number that follows the width."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.layer_norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        tokens = self.grouped(self.relu(self.norm(self.first(x)))).flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return self.head(self.layer_norm(tokens).mean(1))


@pytest.fixture(scope="module")
def plan() -> aw.Plan:
    return aw.plan(Mixed(), X)


@pytest.fixture(scope="module")
def data(plan: aw.Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(plan.to_json()))
    return found


def test_every_change_of_a_file_is_noticed(plan: aw.Plan, data: dict[str, Any]) -> None:
    """Also one that leaves a plausible plan, such as another count of multiply-adds."""
    tried = 0
    for what, changed in mutated(data, random.Random(0), 600):
        tried += 1
        refused, found = refusal(aw.Plan.from_json, changed)
        assert refused or found == plan, what
    assert tried > 500


def test_a_plan_edited_on_purpose_is_read_by_its_schema(data: dict[str, Any]) -> None:
    """Without its checksum it is a plan that can be used, or one clear error."""
    own = {name: value for name, value in data.items() if name != "sha256"}
    used = []
    for _, changed in mutated(own, random.Random(1), 400):
        found = refusal(aw.Plan.from_json, changed)[1]
        if found is not None:
            assert str(found)
            assert found.macs(found.narrowest) <= found.macs(found.full)
            used.append(found)
    assert 20 < len(used) < 200
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # little of it may narrow
        for found in used[::4]:
            refusal(aw.slimmable, Mixed(), found)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("groups", "x", "groups"),
        ("folds", [["first"]], "folds"),
        ("widths", [0.25, float("nan"), 8], "widths"),
        ("example", [[[2, 3, 4, 4], "system"]], "example"),
        ("example", [[[2, 3, 10**9, 4], "float32"]], "example"),
        ("inputs", {"head.weight": 7}, "head.weight"),
        ("scales", {"nothing": [[["first", 1]], 1.0]}, "nothing"),
        ("parameters", ["nothing"], "nothing"),
        ("unknown", 1, "unknown"),
    ],
)
def test_a_wrong_field_is_named(data: dict[str, Any], field: str, value: Any, named: str) -> None:
    changed = {**data, field: value}
    del changed["sha256"]
    with pytest.raises(aw.AnywidthError, match=named):
        aw.Plan.from_json(changed)


def changed_group(data: dict[str, Any], **fields: Any) -> dict[str, Any]:
    first, *others = data["groups"]
    rest = {name: value for name, value in data.items() if name != "sha256"}
    return {**rest, "groups": [{**first, **fields}, *others]}


@pytest.mark.parametrize(
    "fields",
    [
        {"channels": 15},
        {"channels": 32},
        {"unit": 0},
        {"unit": 3},
        {"divisor": 0},
        {"tied": ["first", 1]},
        {"tied": ["nothing", 1]},
        {"name": "head"},
        {"channels": True},
    ],
)
def test_groups_that_contradict_the_rest_are_refused(
    data: dict[str, Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(aw.AnywidthError, match="damaged"):
        aw.Plan.from_json(changed_group(data, **fields))


def test_attributes_and_layers_of_another_network_are_refused(data: dict[str, Any]) -> None:
    """The tensors fit, but at full width the network would no longer be the same."""
    own = {name: value for name, value in data.items() if name != "sha256"}
    renamed = [["nothing", *slot[1:]] for slot in own["attributes"]]
    with pytest.raises(aw.AnywidthError, match="nothing"):
        aw.slimmable(Mixed(), aw.Plan.from_json({**own, "attributes": renamed}))
    swapped = [[slot[0], "bias", *slot[2:]] for slot in own["attributes"]]
    with pytest.raises(aw.AnywidthError, match="bias"):
        aw.slimmable(Mixed(), aw.Plan.from_json({**own, "attributes": swapped}))


def test_an_example_that_the_network_cannot_take_is_named(data: dict[str, Any]) -> None:
    own = {name: value for name, value in data.items() if name != "sha256"}
    found = aw.Plan.from_json({**own, "example": [[[2, 5, 4, 4], "float32"]]})
    with pytest.raises(aw.AnywidthError, match="example"):
        aw.slimmable(Mixed(), found)
