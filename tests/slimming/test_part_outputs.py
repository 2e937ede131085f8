"""Networks that choose by values are compared by their parts, and then given the same ones."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from anywidth.slimming.verifying.part_outputs import difference, given_outputs, kept_outputs

x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)
        self.threshold, self.calls = 0.0, 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            scores = self.score(x)[:, 0]
        return x[scores.mul_(2) >= self.threshold]


def pair(noise: float) -> tuple[Chooser, Chooser]:
    """Two networks, nearly the same, of which one keeps the row that the other does not."""
    torch.manual_seed(0)
    one = Chooser()
    with torch.no_grad():
        one.threshold = (2 * one.score(x)).median().item()
        other = copy.deepcopy(one)
        other.score.bias -= noise
    return one, other


@torch.no_grad()
def compared(one: nn.Module, other: nn.Module) -> tuple[list[float], float]:
    with kept_outputs(one, ["score"]) as outputs:
        chosen = one(x)
    with given_outputs(other, ["score"], outputs) as gaps:
        same = other(x)
    return gaps, difference(chosen, same)


def test_a_choice_that_rounding_changes_is_no_difference() -> None:
    one, other = pair(1e-6)
    assert one(x).shape != other(x).shape
    gaps, whole = compared(one, other)
    assert 0 < gaps[0] < 1e-5
    assert whole == 0
    assert one(x).shape != other(x).shape  # afterwards each has its own again


def test_parts_that_differ_are_seen_and_so_are_other_choices() -> None:
    one, other = pair(0.1)
    assert compared(one, other)[0][0] > 0.05
    one, other = pair(0.0)
    other.threshold += 1.0
    assert compared(one, other) == ([0.0], float("inf"))


def test_parts_called_more_or_less_often_differ() -> None:
    one, other = pair(0.0)
    one.calls = 2
    assert compared(one, other)[0][-1] == float("inf")
    assert compared(other, one)[0][-1] == float("inf")
