"""Tensors that run though no output needs them, or only in training, narrow with their channels."""

from __future__ import annotations

from typing import Any

import torch
from agreement import assert_agrees, convert
from torch import Tensor, nn

import anywidth as aw

x = torch.linspace(-1, 1, 32).view(8, 4).T.contiguous().add(0.5)


class Unused(nn.Module):
    """As in CLIP's classifier: a norm runs, and its result is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        self.norm(y)
        return self.head(y)


def test_a_norm_whose_result_is_thrown_away_narrows() -> None:
    model = convert(Unused(), x)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (1, 2)
    assert any("norm.weight" in note for note in plan.notes)
    small = aw.extract(model, 0.5)
    assert small.norm.weight.shape == small.norm.normalized_shape == (16,)
    assert_agrees(model, x)
    again = Unused()
    aw.slimmable(again, aw.Plan.from_json(plan.to_json()), strict=True)
    assert aw.extract(again, 0.5).norm.weight.shape == (16,)
    assert model.norm.weight.shape == (32,)


class OnlyInTraining(Unused):
    """What an export cannot follow: a branch on values."""

    def __init__(self) -> None:
        super().__init__()
        self.masked = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        if self.training:
            chosen = x.sum(1) > 0
            if chosen.any():
                y[chosen] = self.masked
        return self.head(y)


def test_a_vector_of_code_that_only_training_runs_narrows() -> None:
    model = convert(OnlyInTraining(), x)
    assert aw.plan_of(model).elastic_layers() == (1, 2)
    small = aw.extract(model, 0.5)
    assert small.masked.shape == (16,)
    small.train()(x)
    model.train()
    with aw.at_width(model, 0.5):
        model(x).sum().backward()
    assert model.masked.grad[:16].any()
    assert not model.masked.grad[16:].any()
    assert_agrees(model, x)


class Fixed(Unused):
    """The size is written into the code, which no norm explains."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu().view(-1, 32)
        self.norm(y)
        return self.head(y)


def test_what_explains_nothing_stays_as_it_was() -> None:
    model: Any = Fixed()
    aw.slimmable(model, example_input=x, allow_fixed=True)
    assert type(model.norm) is nn.LayerNorm
    assert model.norm.normalized_shape == (32,)
    assert aw.plan_of(model).tensors["norm.weight"] == (None,)
