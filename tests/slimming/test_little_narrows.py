"""A network of which little or nothing narrows says so."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agrees, convert
from torch import Tensor, nn

import anywidth as aw


class Sorted(nn.Module):
    """Sorting fixes the channels; a second, elastic branch may lie beside it."""

    def __init__(self, beside: int = 0) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 64), nn.Linear(64, 4)
        self.beside = nn.Sequential(nn.Linear(8, beside), nn.Linear(beside, 4)) if beside else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.stem(x).sort(1).values)
        return y if self.beside is None else y + self.beside(x)


x = torch.randn(2, 8)


def test_a_network_that_cannot_narrow_is_refused() -> None:
    model = Sorted()
    with pytest.raises(aw.AnywidthError, match="sort"):
        aw.slimmable(model, example_input=x)
    assert type(model.stem) is nn.Linear
    aw.slimmable(model, example_input=x, allow_fixed=True)
    assert aw.macs(model, 0.25) == aw.macs(model, 1.0)


def test_a_network_that_hardly_narrows_warns() -> None:
    with pytest.warns(UserWarning, match="33%"):
        model = aw.slimmable(Sorted(beside=32), example_input=x)
    assert aw.plan_of(model).elastic_share() == pytest.approx(1 / 3)
    assert_agrees(model, x)


def test_a_network_that_narrows_for_the_most_part_is_quiet() -> None:
    model = aw.slimmable(Sorted(beside=128), example_input=x)
    assert aw.plan_of(model).elastic_share() == pytest.approx(2 / 3)
    assert "67%" in str(aw.plan_of(model))


def test_groups_pinned_by_the_user_are_no_news() -> None:
    plan = aw.plan(Sorted(beside=128), x)
    plan.pin("beside.0")
    with pytest.raises(aw.AnywidthError, match="pinned"):
        aw.slimmable(Sorted(beside=128), plan)


class Multiplied(nn.Module):
    """Layers that are parameters: as GPT-2's, as a product, as experts in a batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32) / 3)
        self.bias, self.kind = nn.Parameter(torch.randn(32)), kind
        self.experts = nn.Parameter(torch.randn(3, 8, 32) / 3)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = {
            "addmm": lambda: torch.addmm(self.bias, x, self.weight),
            "matmul": lambda: x @ self.weight,
            "from_the_left": lambda: (self.weight.mT @ x.mT).mT,
            "einsum": lambda: torch.einsum("bi,io->bo", x, self.weight),
            "bmm": lambda: torch.bmm(x.expand(3, -1, -1), self.experts).mean(0),
        }[self.kind]()
        return self.head(y)


@pytest.mark.parametrize("kind", ["addmm", "matmul", "from_the_left", "einsum", "bmm"])
def test_products_with_parameters_count_as_layers(kind: str) -> None:
    model = convert(Multiplied(kind), x)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (1, 2)
    name = "experts" if kind == "bmm" else "weight"
    assert plan.group_of(name).channels == 32
    assert plan.group_read_by("head").name == name
    assert aw.macs(model, 0.5) < aw.macs(model, 1.0)
    assert_agrees(model, x)


class Slopes(nn.Module):
    """Attention whose heads and their features meet constants; the rest narrows."""

    def __init__(self, heads: int = 8) -> None:
        super().__init__()
        self.heads, self.stem, self.head = heads, nn.Linear(8, 32), nn.Linear(32, 4)
        self.joined, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in self.joined(x).chunk(3, -1))
        scores = torch.einsum("bihd,bjhd->bhij", q + torch.arange(4), k)
        scores = scores + torch.arange(1, 9).view(-1, 1, 1) / 8
        mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
        return self.head(x + self.out(mixed.flatten(2))).mean(1)


def test_a_plan_says_what_stays_whole_and_what_that_costs() -> None:
    plan = aw.plan(Slopes(), torch.randn(2, 5, 8))
    (held,) = plan.held_back()
    assert held.layers == ("joined",)
    assert "meets an axis of constant size in add" in held.reason
    left = plan.macs(plan.narrowest) / plan.macs(plan.full)
    assert 0 < held.share < left
    assert f"costs {held.share:.0%} joined: {held.reason}" in str(plan)
    assert aw.Plan.from_json(plan.to_json()).held_back() == [held]


def test_outputs_and_what_a_user_pins_are_no_news() -> None:
    plan = aw.plan(Sorted(beside=128), x)
    plan.pin("beside.0")
    assert [held.layers for held in plan.held_back()] == [("stem",)]


def test_a_network_that_keeps_much_warns_although_most_of_it_shrinks() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.up, self.down = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            return y + self.down(self.up(y).relu())

    with pytest.warns(UserWarning, match=r"stem.*: is an output of the model"):
        aw.slimmable(Hidden(), example_input=torch.randn(2, 64))
