"""Channels that are reduced to what leaves the network are its classes, and stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import assert_agrees, convert
from torch import Tensor, nn

import anywidth as aw


class Ending(nn.Module):
    """A small classifier whose ten scores go through a function before they leave."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.stem, self.head, self.function = nn.Linear(8, 32), nn.Linear(32, 10), function

    def forward(self, x: Tensor) -> object:
        return self.function(self.head(self.stem(x).relu()))


class Tagger(nn.Module):
    """The score of all sequences of tags, as a conditional random field sums it up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.emit = nn.Linear(8, 32), nn.Linear(32, 6)
        self.transitions = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.emit(self.stem(x).relu())
        total = scores[:, 0]
        for step in range(1, x.shape[1]):
            steps = total[:, :, None] + self.transitions + scores[:, step, None, :]
            total = steps.logsumexp(1)
        return total.logsumexp(1)


ENDINGS = {
    "max": lambda x: x.softmax(1).max(1),
    "max_value": lambda x: x.softmax(1).max(1).values.sqrt(),
    "logsumexp": lambda x: x.logsumexp(1),
    "mean": lambda x: x.mean(1),
    "largest_kept": lambda x: x.amax(1, keepdim=True),
    "entropy": lambda x: -(x.softmax(1) * x.log_softmax(1)).sum(1) / 2,
    "entropy_of_a_row": lambda x: (x.softmax(1)[:, None] * x.log_softmax(1)[:, None]).sum(2),
    "entropy_by_einsum": lambda x: torch.einsum("bc,bc->b", x.softmax(1), x.log_softmax(1)),
    "entropy_by_a_product": lambda x: x.softmax(1)[:, None] @ x.log_softmax(1)[:, :, None],
    "energy": lambda x: torch.einsum("bc->b", x.exp()).log(),
    "times_ones": lambda x: x.exp() @ x.new_ones(x.shape[1]),
    "any": lambda x: (x > 0).any(1).float(),
    "expectation": lambda x: (x.softmax(1) * torch.arange(10.0)).sum(1),
    "reshaped": lambda x: x.view(-1, 2, 5).sum((1, 2)),
    "without_gradients": lambda x: torch.no_grad()(lambda y: y.mean(1))(x),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_classes_that_are_reduced_at_the_end_stay(name: str) -> None:
    x = torch.randn(2, 8)
    model = convert(Ending(ENDINGS[name]), x)
    assert aw.extract(model, 0.25).head.out_features == 10
    assert aw.extract(model, 0.25).stem.out_features == 8
    assert_agrees(model, x)


def test_the_plan_says_which_reduction_keeps_the_classes() -> None:
    plan = aw.plan(Ending(ENDINGS["max"]), torch.randn(2, 8))
    assert "max" in str(plan.group_of("head").fixed)


def test_tags_stay() -> None:
    x = torch.randn(2, 5, 8)
    model = convert(Tagger(), x)
    assert aw.extract(model, 0.25).transitions.shape == (6, 6)
    assert aw.extract(model, 0.25).stem.out_features == 8
    assert_agrees(model, x)


def test_classes_whose_indices_choose_something_else_stay() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.table, self.head = (
                nn.Linear(8, 6),
                nn.Embedding(6, 16),
                nn.Linear(16, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.score(x).max(1).indices
            return self.head(self.table(chosen))

    model = convert(Routed(), torch.randn(2, 8), allow_fixed=True)
    assert aw.extract(model, 0.25).score.out_features == 6


@pytest.mark.parametrize(
    "function",
    [
        lambda one, other: (one * other).sum(1),
        lambda one, other: torch.einsum("bc,bc->b", one, other),
        lambda one, other: other @ other.T,
        lambda one, other: torch.cosine_similarity(one, other),
    ],
)
def test_features_that_are_compared_narrow(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Compared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(5, 32), nn.Linear(8, 32)

        def forward(self, index: Tensor, x: Tensor) -> Tensor:
            return function(self.user(index), self.item(x))

    inputs = torch.tensor([0, 3]), torch.randn(2, 8)
    model = convert(Compared(), inputs)
    assert aw.extract(model, 0.25).item.out_features == 8
    assert_agrees(model, *inputs)


def test_channels_that_are_reduced_inside_narrow() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.gate, self.head = nn.Linear(8, 32), nn.Linear(1, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            return self.head(y * self.gate(y.mean(1, keepdim=True)))

    x = torch.randn(2, 8)
    model = convert(Gated(), x)
    assert aw.extract(model, 0.25).stem.out_features == 8
    assert_agrees(model, x)


def test_a_state_in_a_dict_of_ones_own_is_a_result() -> None:
    """Only the output classes of transformers have states that nobody else reads."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            state = self.body(x).relu()
            return {"logits": self.head(state), "state": state}

    assert aw.plan(Policy(), torch.randn(2, 8)).groups["body"].fixed
