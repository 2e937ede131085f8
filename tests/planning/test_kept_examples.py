"""What a plan keeps of the arguments that it was made with."""

import json
from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

import anywidth as aw
from anywidth.errors import AnywidthError
from anywidth.planning.example_inputs import example_inputs

Pair = namedtuple("Pair", "left right")


class TakesADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 32), nn.Linear(6, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, batch: dict[str, Tensor | list[Tensor]]) -> Tensor:
        return self.head(torch.relu(self.left(batch["left"]) + self.right(batch["right"][0])))


class TakesAPair(TakesADict):
    def forward(self, pair: Pair) -> Tensor:
        return self.head(torch.relu(self.left(pair.left) + self.right(pair.right)))


BATCH = {"left": torch.randn(2, 8), "right": [torch.randn(2, 6)]}


def saved_and_read(plan: aw.Plan) -> aw.Plan:
    return aw.Plan.from_json(json.loads(json.dumps(plan.to_json())))


def test_a_dict_of_tensors_and_lists_is_made_again() -> None:
    plan = saved_and_read(aw.plan(TakesADict(), BATCH))
    (batch,) = example_inputs(TakesADict(), plan)
    assert batch["left"].shape == (2, 8)
    assert [one.shape for one in batch["right"]] == [(2, 6)]


def test_a_network_that_takes_a_dict_is_converted_by_its_saved_plan() -> None:
    model = TakesADict()
    aw.slimmable(model, saved_and_read(aw.plan(model, BATCH)))
    with aw.at_width(model, 0.5):
        sliced = model(BATCH)
    torch.testing.assert_close(aw.extract(model, 0.5)(BATCH), sliced)


def test_an_argument_of_another_class_is_asked_for() -> None:
    """A tuple in its place would have no attributes."""
    model = TakesAPair()
    pair = Pair(torch.randn(2, 8), torch.randn(2, 6))
    plan = saved_and_read(aw.plan(model, (pair,)))
    with pytest.raises(AnywidthError, match="example_input"):
        aw.slimmable(model, plan)
    aw.slimmable(model, plan, example_input=(pair,))


def test_a_file_with_lists_in_lists_without_end_is_refused() -> None:
    data = aw.plan(TakesADict(), BATCH).to_json()
    deep = [[1], "float32"]
    for _ in range(200):
        deep = {"items": [deep]}
    data["example"] = [deep]
    with pytest.raises(AnywidthError, match="example"):
        aw.Plan.from_json(data)
