"""A conversion is verified with the example it was planned with, and not-a-number is a failure."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from agreement import assert_agrees
from torch import Tensor, nn

import anywidth as aw


class Reader(nn.Module):
    """Tokens, and a mask that says which of them count; it remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block, self.head = (
            nn.Embedding(50, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 4),
        )
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.seen.append((tokens, mask))
        y = self.table(tokens)
        scores = (y @ self.block(y).mT).masked_fill(mask[:, None] == 0, float("-inf"))
        return self.head(scores.softmax(-1) @ y).mean(1)


def example() -> tuple[Tensor, Tensor]:
    return torch.randint(1, 50, (2, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])


def test_the_example_of_the_plan_is_run() -> None:
    model, inputs = Reader(), example()
    aw.slimmable(model, aw.plan(model, inputs))
    assert model.seen
    for tokens, mask in model.seen:
        assert torch.equal(tokens, inputs[0][: len(tokens)])
        assert torch.equal(mask, inputs[1][: len(mask)])
    assert_agrees(model, *inputs)


def test_a_plan_from_a_file_knows_what_whole_numbers_may_be() -> None:
    model, inputs = Reader(), example()
    plan = aw.Plan.from_json(json.loads(json.dumps(aw.plan(model, inputs).to_json())))
    aw.slimmable(model, plan)
    assert all(torch.equal(tokens, inputs[0][: len(tokens)]) for tokens, _ in model.seen)


def test_many_whole_numbers_are_kept_as_a_range() -> None:
    tokens = torch.randint(3, 50, (2, 4000))
    plan = aw.plan(nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 4)), tokens)
    text = json.dumps(plan.to_json())
    assert len(text) < 5000
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 4))
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    aw.slimmable(model, aw.Plan.from_json(json.loads(text)))
    assert min(int(x.min()) for x in seen) >= 3
    assert max(int(x.max()) for x in seen) > 40


def test_an_example_that_gives_no_numbers_is_refused() -> None:
    model, (tokens, mask) = Reader(), example()
    with pytest.raises(aw.AnywidthError, match="NaN"):
        aw.slimmable(model, aw.plan(model, (tokens, torch.zeros_like(mask))))
    assert not hasattr(model, "_anywidth")
    aw.slimmable(model, aw.plan(model, (tokens, torch.zeros_like(mask))), verified=False)


def test_a_group_that_gives_no_numbers_when_narrow_is_pinned() -> None:
    class Spread(nn.Module):
        """The variance of one channel is not a number: it is 0 / 0."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.wide, self.head = nn.Linear(8, 4), nn.Linear(8, 32), nn.Linear(36, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            squares = (y - y.mean(1, keepdim=True)).square().sum(1, keepdim=True)
            return self.head(torch.cat([y * squares / (y.shape[1] - 1), self.wide(x)], 1))

    x = torch.randn(2, 8)
    model = aw.slimmable(Spread(), example_input=x, widths=aw.WidthRange(0.25, 1.0, 1))
    plan = aw.plan_of(model)
    assert "NaN" in str(plan.group_of("stem").fixed)
    assert plan.group_of("wide").fixed is None
    assert_agrees(model, x)


def test_arguments_of_other_kinds_need_not_be_given_again() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, several: list[Tensor]) -> Tensor:
            return self.head(torch.stack([self.stem(x) for x in several]).mean(0))

    inputs: Any = ([torch.randn(2, 8), torch.randn(2, 8)],)
    model = Many()
    aw.slimmable(model, aw.plan(model, inputs))
    assert_agrees(model, *inputs)


def test_a_converted_network_does_not_keep_the_example() -> None:
    model, inputs = Reader(), example()
    plan = aw.plan(model, inputs)
    aw.slimmable(model, plan)
    assert aw.plan_of(model).given is None
    assert plan.copy().given is plan.given


def test_nothing_runs_on_tensors_without_entries() -> None:
    """Some kernels end the process if they are given one: no Python error would be seen."""

    class Fused(nn.Module):
        """Queries and keys from one layer, cut where Python says."""

        def __init__(self) -> None:
            super().__init__()
            self.both, self.head = nn.Linear(8, 64), nn.Linear(8, 128)
            self.out = nn.Linear(128, 4)
            self.ran: list[tuple[int, ...]] = []

        def forward(self, x: Tensor) -> Tensor:
            both = self.both(x)
            queries, keys = both[:, :32], both[:, 32:]
            heads = keys.view(keys.shape[0], keys.shape[1] // 16, 16)
            if not torch.compiler.is_exporting():
                self.ran.append(tuple(heads.shape))
            scores = heads.mean((1, 2)) + queries.mean(1)
            return self.out(self.head(x) * scores[:, None])

    x = torch.randn(2, 8)
    model = Fused()
    aw.slimmable(model, example_input=x, widths=aw.WidthRange(0.25, 1.0, 1))
    plan = aw.plan_of(model)
    assert "entries" in str(plan.group_of("both").fixed)
    assert all(0 not in shape for shape in model.ran)
    assert plan.group_of("head").fixed is None
    assert_agrees(model, x)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.last(self.first(x).relu()))


def test_complex_outputs_are_compared_up_to_rounding() -> None:
    model = Spectrum()
    aw.slimmable(model, aw.plan(model, torch.randn(2, 8)), strict=True)
    assert aw.extract(model, 0.5).first.out_features == 16
