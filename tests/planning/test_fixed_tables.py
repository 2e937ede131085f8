"""Tables of numbers that are not learned: each of their parts narrows, or all of them stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import assert_agrees, convert
from torch import Tensor, nn
from torch.nn import functional as F

import anywidth as aw

SIDE, WIDTH = 6, 64


def waves(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Sines and cosines of positions at falling frequencies."""
    angles = positions[:, None] * 100.0 ** (-torch.arange(width) / width)
    return angles.sin(), angles.cos()


def halves(positions: Tensor, width: int) -> Tensor:
    return torch.cat(waves(positions, width // 2), 1)


def pairs(positions: Tensor, width: int) -> Tensor:
    return torch.stack(waves(positions, width // 2), 2).flatten(1)


def rows_and_columns(width: int, part: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Of each place in a square, its row in the first half and its column in the second."""
    places = torch.arange(float(SIDE))
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    return torch.cat([part(x.flatten(), width // 2) for x in (rows, columns)], 1)


def learned_once(width: int) -> Tensor:
    """As `rows_and_columns`, of numbers without a pattern."""
    rows, columns = torch.randn(SIDE, width // 2), torch.randn(SIDE, width // 2)
    return torch.cat([rows.repeat_interleave(SIDE, 0), columns.repeat(SIDE, 1)], 1)


class Placed(nn.Module):
    """Patches, a table that says where each is, a layer and a head."""

    def __init__(self, table: Tensor, kind: str = "buffer") -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        if kind == "buffer":
            self.register_buffer("table", table)
        elif kind == "parameter":
            self.table = nn.Parameter(table[None], requires_grad=False)
        else:
            self.places = nn.Embedding.from_pretrained(table)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        y = self.stem(x)
        y = y + (
            self.places(places) if self.kind == "embedding" else self.table[..., : len(places), :]
        )
        return self.head((y + self.block(y)).mean(1))


x = torch.randn(2, SIDE * SIDE, 8)


def kept_columns(model: nn.Module, table: Tensor) -> list[int]:
    """Which columns of the table are active at half the width."""
    with aw.at_width(model, 0.5):
        active = model.places.weight if model.kind == "embedding" else model.table
        active = active.reshape(-1, active.shape[-1])
    return [next(i for i in range(WIDTH) if torch.equal(table[:, i], c)) for c in active.T]


@pytest.mark.parametrize("kind", ["buffer", "parameter", "embedding"])
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: rows_and_columns(WIDTH, halves), 4),
        (lambda: rows_and_columns(WIDTH, pairs), 2),
        (lambda: halves(torch.arange(float(SIDE * SIDE)), WIDTH), 2),
        (lambda: learned_once(WIDTH), 2),
    ],
    ids=["sines_of_both", "pairs_of_both", "sines_then_cosines", "two_tables"],
)
def test_each_part_narrows(make: Callable[[], Tensor], parts: int, kind: str) -> None:
    table = make()
    model = convert(Placed(table, kind), x)
    step = WIDTH // parts
    first = [start + i for start in range(0, WIDTH, step) for i in range(step // 2)]
    assert kept_columns(model, table) == first
    assert any("table" in note for note in aw.plan_of(model).notes)
    assert_agrees(model, x)


def test_neighbouring_sines_and_cosines_are_cut_as_they_are() -> None:
    table = pairs(torch.arange(float(SIDE * SIDE)), WIDTH)
    model = convert(Placed(table), x)
    assert kept_columns(model, table) == list(range(WIDTH // 2))
    assert_agrees(model, x)


def test_a_table_without_visible_parts_keeps_the_channels() -> None:
    plan = aw.plan(Placed(torch.randn(SIDE * SIDE, WIDTH)), x)
    assert "table" in str(plan.group_of("stem").fixed)


def test_a_frozen_embedding_without_parts_narrows() -> None:
    table = torch.randn(SIDE * SIDE, WIDTH)
    assert kept_columns(convert(Placed(table, "embedding"), x), table) == list(range(WIDTH // 2))


def test_a_table_of_equal_columns_narrows() -> None:
    """As the knots of splines, which are the same for each feature."""
    table = torch.randn(SIDE * SIDE, 1).repeat(1, WIDTH)
    model = convert(Placed(table), x)
    assert aw.plan_of(model).elastic_layers() == (2, 3)


class Colours(nn.Module):
    """A frozen change of colours before the network and one after it, as in EDSR."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 3, 3))
        self.before.requires_grad_(False)
        self.after.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.body(self.before(x)))


def test_frozen_colours_stay() -> None:
    model = convert(Colours(), torch.randn(2, 3, 8, 8))
    small = aw.extract(model, 0.25)
    assert small.before.weight.shape == small.after.weight.shape == (3, 3, 1, 1)
    assert small.body[0].out_channels == 4
    assert "frozen" in str(aw.plan_of(model).group_of("before").fixed)


def test_heads_that_do_not_divide_keep_the_channels() -> None:
    class Attending(Placed):
        def __init__(self) -> None:
            super().__init__(rows_and_columns(WIDTH, halves))
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x) + self.table
            return self.head(self.attention(y, y, y)[0].mean(1))

    assert "table" in str(aw.plan(Attending(), x).group_of("stem").fixed)


def test_masks_of_weights_follow_them() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
            self.register_buffer("mask", (torch.rand(32, 8) > 0.5).float())

        def forward(self, x: Tensor) -> Tensor:
            return self.head(nn.functional.linear(x, self.stem.weight * self.mask, self.stem.bias))

    model = convert(Masked(), torch.randn(2, 8))
    assert aw.extract(model, 0.25).mask.shape == (8, 8)
    assert_agrees(model, torch.randn(2, 8))


def test_a_place_for_padding_hides_no_parts() -> None:
    """As in tables that are sines and cosines but for a row of zeros."""
    table = halves(torch.arange(float(SIDE * SIDE)), WIDTH)
    table[1] = 0
    model = convert(Placed(table), x)
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    assert kept_columns(model, table) == [*range(16), *range(32, 48)]
    assert_agrees(model, x)


def test_a_table_of_zeros_has_no_parts_to_tell() -> None:
    plan = aw.plan(Placed(torch.zeros(SIDE * SIDE, WIDTH)), x)
    assert "table" in str(plan.group_of("stem").fixed)


class Filtered(nn.Module):
    """A filter, or four of them, repeated for each channel by the code."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.body, self.head = nn.Conv2d(16 * filters, 32, 3), nn.Conv2d(32, 4, 1)
        self.register_buffer("filters", torch.rand(filters, 1, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        weight = self.filters.repeat(x.shape[1], 1, 1, 1)
        return self.head(self.body(F.conv2d(x, weight, stride=2, groups=x.shape[1])))


@pytest.mark.parametrize("filters", [1, 4])
def test_filters_that_are_repeated_for_each_channel_hold_none_back(filters: int) -> None:
    x = torch.rand(2, 3, 16, 16)
    model = convert(Filtered(filters), x)
    assert aw.plan_of(model).elastic_layers() == (3, 4)
    small = aw.extract(model, 0.5)
    assert small.body.weight.shape[:2] == (16, 8 * filters)
    assert torch.equal(small.filters, model.filters)
    assert_agrees(model, x)


def test_filters_that_are_repeated_a_constant_number_of_times_keep_the_channels() -> None:
    class Constant(Filtered):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.filters.repeat(16, 1, 1, 1)
            return self.head(self.body(F.conv2d(self.stem(x), weight, stride=2, groups=16)))

    plan = aw.plan(Constant(1), torch.rand(2, 3, 16, 16))
    assert plan.group_of("stem").fixed is not None


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ((torch.arange(WIDTH) < WIDTH // 2).float(), [1.0] * 8 + [0.0] * 8),
        (torch.arange(WIDTH) < WIDTH // 2, [True] * 8 + [False] * 8),
        (torch.arange(4.0).repeat_interleave(WIDTH // 4), [n for n in range(4) for _ in range(4)]),
        (torch.arange(WIDTH / 2).repeat(2), [*range(8), *range(8)]),
        (torch.arange(float(WIDTH)), [*range(16)]),
    ],
)  # fmt: skip
def test_each_stretch_of_a_row_narrows(row: Tensor, kept: list[float]) -> None:
    """A mask of half the channels must not become a mask of none."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
            self.register_buffer("row", row)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stem(x) * self.row)

    x = torch.randn(2, 8)
    model = convert(Masked(), x)
    assert aw.extract(model, 0.25).row.tolist() == kept
    assert_agrees(model, x)
