"""Tables that a module keeps as plain attributes narrow as buffers do, and stay attributes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from agreement import assert_agrees, assert_close, convert
from torch import Tensor, nn

import anywidth as aw

WIDTH, PLACES = 64, 6


def waves(width: int) -> Tensor:
    """Sines, then cosines, of each place."""
    angles = torch.arange(PLACES)[:, None] * 100.0 ** (-torch.arange(width / 2) / width)
    return torch.cat([angles.sin(), angles.cos()], 1)


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = waves(WIDTH)
        self.stem, self.block = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x) + self.places.detach().type_as(x)).relu())


x = torch.randn(2, PLACES, 8)


def network() -> nn.Sequential:
    return nn.Sequential(Placed(), nn.ReLU()).eval()


def test_each_part_of_a_plain_table_narrows() -> None:
    model = network()
    before, table = model(x), model[0].places
    model = convert(model, x)
    assert_close(model(x), before, tolerance=0)
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    small = aw.extract(model, 0.25)
    assert torch.equal(small[0].places, torch.cat([table[:, :8], table[:, 32:40]], 1))
    assert "places" in vars(small[0])
    assert "places" not in model.state_dict()
    assert_agrees(model, x)


def test_sorting_permutes_a_plain_table() -> None:
    model = network()
    before, table = model(x), model[0].places.clone()
    aw.sort_channels(model, example_input=x)
    assert_close(model(x), before)
    assert not torch.equal(vars(model[0])["places"], table)


def test_planning_and_failing_leave_it_a_plain_attribute() -> None:
    model = network()
    table = model[0].places
    plan = aw.plan(model, x)
    assert vars(model[0])["places"] is table
    plan.shapes["0.stem.weight"] = (1, 1)
    with pytest.raises(aw.AnywidthError):
        aw.slimmable(model, plan)
    assert vars(model[0])["places"] is table
    assert not dict(model.named_buffers())


def test_copies_and_saved_plans_know_of_it() -> None:
    model = network()
    plan = aw.Plan.from_json(aw.plan(model, x).to_json())
    again = network()
    again.load_state_dict(model.state_dict())
    aw.slimmable(again, plan)
    for other in (copy.deepcopy(again), pickle.loads(pickle.dumps(again)), aw.replica(again)):
        with aw.at_width(other, 0.5):
            expected = other(x)
        small = aw.extract(other, 0.5)
        assert_close(small(x), expected)
        assert vars(small[0])["places"].shape == (PLACES, 32)


def test_a_table_whose_parts_cannot_be_told_keeps_the_channels() -> None:
    model = network()
    model[0].places = torch.randn(PLACES, WIDTH)
    assert "places" in str(aw.plan(model, x).group_of("0.stem").fixed)


def test_tensors_that_a_forward_assigns_are_left_alone() -> None:
    class Remembering(Placed):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            self.last = found.detach()
            return found

    model = nn.Sequential(Remembering(), nn.ReLU()).eval()
    model(x)
    model = convert(model, x)
    assert list(dict(model.named_buffers())) == ["0.places"]
    assert_agrees(model, x)
