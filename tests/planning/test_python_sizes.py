"""Sizes that Python code works out: the graph shows numbers, running narrower shows the rest."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agrees, convert
from torch import Tensor, nn

import anywidth as aw
from anywidth.slimming.extraction import extract_quietly

IMAGE = (2, 3, 4, 4)


class Reshaping(nn.Module):
    """A convolution, a reshape by a method of its own, and a head."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, channels, 1), nn.Conv2d(channels, 4, 1)

    def middle(self, y: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.stem(x)))


class EightGroups(Reshaping):
    """More groups than channels in one, so that the largest dimension is not the one to narrow."""

    def middle(self, y: Tensor) -> Tensor:
        b, c, h, w = y.shape
        return y.view(b, 8, c // 8, h, w).transpose(1, 2).reshape(b, c, h, w)


class GroupsOfEight(Reshaping):
    def middle(self, y: Tensor) -> Tensor:
        b, c, h, w = y.shape
        return y.view(b, -1, 8, h, w).cumsum(2).reshape(b, c, h, w)


class GroupsBesideTheBatch(Reshaping):
    def middle(self, y: Tensor) -> Tensor:
        b, c, h, w = y.shape
        return y.reshape(b * 8, c // 8, h, w).softmax(1).reshape(b, 8, c // 8, h, w).flatten(1, 2)


class Shuffle(nn.Module):
    def forward(self, y: Tensor, channels: int) -> Tensor:
        b, _, h, w = y.shape
        return y.view(b, 8, channels // 8, h, w).transpose(1, 2).reshape(b, channels, h, w)


class AttributeInTheReshape(Reshaping):
    """Both reshapes are sized by an attribute of the module that calls the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = 32

    def middle(self, y: Tensor) -> Tensor:
        b, _, h, w = y.shape
        z = y.view(b, 8, self.channels // 8, h, w).transpose(1, 2)
        return z.reshape(b, self.channels, h, w)


class AttributeOfAnother(AttributeInTheReshape):
    """It runs if `channels` follows, which another module is given as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.shuffle = Shuffle()

    def middle(self, y: Tensor) -> Tensor:
        shuffled: Tensor = self.shuffle(y, self.channels)
        return shuffled


class PiecesOfEight(Reshaping):
    """As many pieces as the width has: the number of pieces narrows, not their size."""

    def middle(self, y: Tensor) -> Tensor:
        return torch.cat([piece.cumsum(1) for piece in y.split(8, 1)], 1)


def assert_is_the_masked_network(model: nn.Module, x: Tensor) -> None:
    """Narrow equals the full network with all inactive entries zero (where no norm comes between).

    Sliced and extracted agree even where both read the wrong channels; this tells.
    """
    plan = aw.plan_of(model)
    for width in (0.25, 0.5, 0.75):
        config = plan.resolve(width)
        masked = extract_quietly(model, plan.full)
        for name, parameter in masked.named_parameters():
            for dim, axis in enumerate(plan.tensors[name]):
                if axis is not None:
                    inactive = torch.ones(parameter.shape[dim], dtype=torch.bool)
                    for start, length in plan.axis_ranges(axis, config):
                        inactive[start : start + length] = False
                    parameter.data.index_fill_(dim, inactive.nonzero().flatten(), 0.0)
        with aw.at_width(model, config), torch.no_grad():
            torch.testing.assert_close(model(x), masked(x))


@pytest.mark.parametrize("kind", [EightGroups, GroupsOfEight])
def test_the_dimension_that_really_narrows_is_found(kind: type[Reshaping]) -> None:
    x = torch.randn(IMAGE)
    model = convert(kind(), x)
    assert aw.plan_of(model).elastic_layers() == (1, 2)
    assert_agrees(model, x)
    assert_is_the_masked_network(model, x)


def test_groups_merged_with_the_batch() -> None:
    x = torch.randn(IMAGE)
    model = convert(GroupsBesideTheBatch(), x)
    with aw.at_width(model, 0.5):
        kept = model.stem.weight[:, 0, 0, 0]
    # The first two of each four.
    assert torch.equal(kept, model.stem.weight[:, 0, 0, 0].view(8, 4)[:, :2].flatten())


def test_the_groups_that_narrow_are_the_outer_ones() -> None:
    model = convert(GroupsOfEight(), torch.randn(IMAGE))
    assert aw.plan_of(model).group_of("stem").unit == 8


def test_the_attribute_that_sizes_a_reshape_is_found() -> None:
    x = torch.randn(IMAGE)
    model = convert(AttributeInTheReshape(), x, aw.WidthRange(0.25, 1.0, divisor=8))
    assert aw.plan_of(model).elastic_layers() == (1, 2)
    assert_is_the_masked_network(model, x)


def test_one_attribute_sizes_reshapes_of_several_modules() -> None:
    x = torch.randn(IMAGE)
    model = convert(AttributeOfAnother(), x, aw.WidthRange(0.25, 1.0, divisor=8))
    assert aw.plan_of(model).elastic_layers() == (1, 2)
    assert_is_the_masked_network(model, x)


def test_pieces_of_constant_size_are_fixed() -> None:
    plan = aw.plan(PiecesOfEight(), torch.randn(IMAGE))
    assert "split" in str(plan.group_of("stem").fixed)


def test_an_attribute_of_the_same_size_stays() -> None:
    """Only the attribute without which the network does not run follows the width."""

    class Scaled(Reshaping):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.channels = 32, 32

        def middle(self, y: Tensor) -> Tensor:
            b, _, h, w = y.shape
            flat = y.reshape(b, self.channels, h * w) / self.scale
            return flat.reshape(b, self.channels, h, w)

    x = torch.randn(IMAGE)
    model = convert(Scaled(), x)
    (note,) = aw.plan_of(model).notes
    assert "channels" in note
    assert "stem" in note
    with aw.at_width(model, 0.5):
        assert (model.channels, model.scale) == (16, 32)
    assert_is_the_masked_network(model, x)


def test_a_size_that_only_shifts_positions_is_found() -> None:
    """It runs whether the attribute follows or not: half the channels, or half the positions."""

    class Positions(Reshaping):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.channels = 32, 32

        def middle(self, y: Tensor) -> Tensor:
            flat = y.reshape(y.shape[0], self.channels, -1) / self.scale
            return flat.softmax(-1).reshape(y.shape)

    class Literal(Reshaping):
        def middle(self, y: Tensor) -> Tensor:
            return y.reshape(y.shape[0], 32, -1).softmax(-1).reshape(y.shape)

    x = torch.randn(IMAGE)
    model = convert(Positions(), x)
    with aw.at_width(model, 0.5):
        assert (model.channels, model.scale) == (16, 32)
    assert_is_the_masked_network(model, x)
    fixed = aw.plan(Literal(), x).group_of("stem").fixed
    assert "reshape" in str(fixed)


def test_two_attributes_follow_where_both_are_needed() -> None:
    class TwoNames(Reshaping):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.before, self.after = 32, 32, 32

        def middle(self, y: Tensor) -> Tensor:
            b, _, h, w = y.shape
            flat = y.reshape(b, self.before, h * w) / self.scale
            return flat.reshape(b, self.after, h, w)

    model = convert(TwoNames(), torch.randn(IMAGE))
    with aw.at_width(model, 0.5):
        assert (model.before, model.after, model.scale) == (16, 16, 32)


class Halved(Reshaping):
    """As in cross-stage networks: the module keeps how many channels there are in all."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.inner = 32, nn.Conv2d(16, 16, 1)

    def middle(self, y: Tensor) -> Tensor:
        kept, changed = y.split(self.width // 2, dim=1)
        return torch.cat([kept, self.inner(changed)], 1)


def test_parts_sized_by_half_of_a_number_narrow() -> None:
    model = convert(Halved(), torch.randn(IMAGE))
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    small = extract_quietly(model, 0.5)
    assert (small.width, small.inner.in_channels) == (16, 8)
    assert_agrees(model, torch.randn(IMAGE))


class Selected(nn.Module):
    """Parts as before, then a choice of paths: only the parts are to blame for a failure."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.stem, self.head = 32, nn.Conv2d(3, 32, 1), nn.Conv2d(16, 4, 1)
        self.paths = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(2))
        self.choice = nn.Conv2d(16, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.stem(x).split(self.width // 2, dim=1)
        made = torch.stack([path(part) for path, part in zip(self.paths, parts, strict=False)], 1)
        scores = self.choice(made.sum(1).mean((2, 3), keepdim=True))
        b, c, h, w = scores.shape
        scores = scores.view(b, 2, c // 2, h, w).softmax(1)
        return self.head((made * scores).sum(1))


def test_a_failure_is_blamed_on_what_the_failing_layer_reads() -> None:
    model = convert(Selected(), torch.randn(IMAGE))
    elastic, layers = aw.plan_of(model).elastic_layers()
    assert elastic == layers - 1
    assert_agrees(model, torch.randn(IMAGE))


class Mixed(Reshaping):
    """As in MixNet: parts of several kernels, their sizes in a list."""

    def __init__(self, sizes: list[int] | tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = sizes
        self.inner = nn.ModuleList(nn.Conv2d(n, n, 1, groups=n) for n in sizes)

    def middle(self, y: Tensor) -> Tensor:
        parts = torch.split(y, self.sizes, 1)
        return torch.cat([f(part) for f, part in zip(self.inner, parts, strict=True)], 1)


@pytest.mark.parametrize("sizes", [[16, 16], (16, 8, 8), [20, 8, 4]])
def test_parts_whose_sizes_are_a_list_narrow(sizes: list[int] | tuple[int, ...]) -> None:
    model = convert(Mixed(sizes), torch.randn(IMAGE))
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (1 + len(sizes), 2 + len(sizes))
    small = extract_quietly(model, 0.5)
    assert list(small.sizes) == [n // 2 for n in sizes]
    assert list(model.sizes) == list(sizes)
    assert_agrees(model, torch.randn(IMAGE))


class Memory(nn.Module):
    """Keeps the size of its state; the rest of what it is given does not change it."""

    def __init__(self, size: int, rest: int) -> None:
        super().__init__()
        self.size = size
        self.mix = nn.Conv2d(size + rest, size, 1)

    def forward(self, state: Tensor, rest: Tensor) -> Tensor:
        return torch.tanh(self.mix(torch.cat([state, rest], 1)))


class SplitByChild(nn.Module):
    """As RAFT: the size of one part is a number of a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.memory = nn.Conv2d(3, 40, 1), Memory(24, 16)
        self.head = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = self.stem(x)
        size = self.memory.size
        state, rest = made.split([size, made.shape[1] - size], 1)
        for _ in range(2):
            state = self.memory(state, rest)
        return self.head(state)


def test_a_part_whose_size_a_module_inside_keeps_narrows() -> None:
    model, x = SplitByChild().eval(), torch.randn(IMAGE)
    before = model(x)
    convert(model, x)
    assert torch.equal(model(x), before)
    narrow = extract_quietly(model, 0.5)
    assert (narrow.memory.size, narrow.stem.out_channels) == (12, 28)
    assert_agrees(model, x)
