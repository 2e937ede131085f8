"""Narrow networks keep the channels that belong together: whole ones with zeros say which."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_is_whole_with_zeros, convert
from counting import counted
from torch import Tensor, nn

import anywidth as aw
from anywidth.slimming.extraction import extract_quietly

WORDS = (2, 5, 6)


class Decoder(nn.Module):
    """Attention to itself and to a memory, by one number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.nhead = 4
        self.embed, self.remember, self.head = nn.Linear(6, 32), nn.Linear(6, 24), nn.Linear(32, 3)
        self.own = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.cross = nn.ModuleList(nn.Linear(n, 32) for n in (32, 24, 24, 32))

    def _attend(self, layers: nn.ModuleList, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            layer(y).reshape(*y.shape[:2], self.nhead, -1).transpose(1, 2)
            for layer, y in zip(layers, (x, memory, memory), strict=False)
        )
        heads = F.scaled_dot_product_attention(q, k, v)
        mixed: Tensor = layers[3](heads.transpose(1, 2).flatten(2))
        return mixed

    def forward(self, x: Tensor) -> Tensor:
        memory, x = self.remember(x), self.embed(x)
        x = x + self._attend(self.own, x, x)
        head: Tensor = self.head(x + self._attend(self.cross, x, memory))
        return head


class GroupedQueries(nn.Module):
    """Eight heads ask, two answer."""

    def __init__(self, answering: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 32), nn.Linear(64, 3)
        self.queries = nn.Linear(32, 64)
        self.keys, self.values = nn.Linear(32, 8 * answering), nn.Linear(32, 8 * answering)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (
            layer(x).unflatten(-1, (-1, 8)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        head: Tensor = self.head(y.transpose(1, 2).flatten(2))
        return head


class RepeatedKeys(nn.Module):
    """The same with sizes that the module keeps, and keys repeated by hand."""

    def __init__(self, answering: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep, self.head_dim = 4, answering, 4 // answering, 8
        self.embed, self.head = nn.Linear(6, 32), nn.Linear(32, 3)
        self.queries = nn.Linear(32, 32)
        self.keys, self.values = nn.Linear(32, 8 * answering), nn.Linear(32, 8 * answering)

    def _repeat(self, x: Tensor) -> Tensor:
        b, n, heads, size = x.shape
        wide = x[:, :, :, None].expand(b, n, heads, self.n_rep, size)
        return wide.reshape(b, n, heads * self.n_rep, size).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        b, n, _ = x.shape
        q = self.queries(x).view(b, n, self.n_heads, self.head_dim)
        k = self.keys(x).view(b, n, self.n_kv_heads, self.head_dim)
        v = self.values(x).view(b, n, self.n_kv_heads, self.head_dim)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), self._repeat(k), self._repeat(v))
        head: Tensor = self.head(y.transpose(1, 2).reshape(b, n, -1))
        return head


class HeadOfTraining(nn.Module):
    """Its second output, which shuffles channels in groups of eight, is for training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
        self.wide, self.second = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 4, 1)

    def forward(self, x: Tensor, both: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        y = self.stem(x).relu()
        if not (self.training or both):
            return self.head(y)
        b, _, h, w = y.shape
        z = self.wide(y).view(b, -1, 8, h, w).transpose(1, 2).reshape(b, -1, h, w)
        return self.head(y), self.second(z.relu())


def converted(model: nn.Module, x: Tensor, divisor: int) -> tuple[nn.Module, nn.Module]:
    """A network, and how it was."""
    original = copy.deepcopy(model)
    return convert(model, x, aw.WidthRange(0.25, 1.0, divisor)), original


def test_one_number_of_heads_is_one_group() -> None:
    x = torch.randn(WORDS)
    model, original = converted(Decoder(), x, 8)
    plan = aw.plan_of(model)
    assert plan.groups["own.0"].makers == tuple(
        f"{a}.{i}" for a in ("own", "cross") for i in range(3)
    )
    assert_agrees(model, x)
    assert_is_whole_with_zeros(model, original, x)


@pytest.mark.parametrize("divisor", [8, 16])
def test_queries_keep_the_keys_they_ask(divisor: int) -> None:
    x = torch.randn(WORDS)
    model, original = converted(GroupedQueries(), x, divisor)
    half = aw.plan_of(model).resolve(0.5)
    assert half["queries"] == 32  # four heads of the eight, and one of the two that answer
    assert_is_whole_with_zeros(model, original, x)
    small = aw.extract(model, 0.5)
    assert small.keys.out_features == small.values.out_features == 8


@pytest.mark.parametrize("answering", [2, 4])
def test_keys_repeated_by_hand(answering: int) -> None:
    x = torch.randn(WORDS)
    model, original = converted(RepeatedKeys(answering), x, 8)
    assert aw.plan_of(model).elastic_layers() == (4, 5)
    small = aw.extract(model, 0.5)
    assert (small.n_heads, small.n_kv_heads, small.n_rep) == (2, answering // 2, 4 // answering)
    assert_agrees(model, x)
    assert_is_whole_with_zeros(model, original, x)


def test_one_key_for_all_queries() -> None:
    x = torch.randn(WORDS)
    model = GroupedQueries(1)
    original = copy.deepcopy(model)
    aw.slimmable(model, aw.plan(model, x), aw.WidthRange(0.25, 1.0, 2))
    assert_is_whole_with_zeros(model, original, x)


def test_reshapes_of_training_are_rehearsed_too() -> None:
    x = torch.randn(2, 3, 4, 4)
    model, original = converted(HeadOfTraining(), x, 2)
    assert aw.plan_of(model).can_narrow("wide")
    assert_is_whole_with_zeros(model, original, x, True)


class Neighbours(nn.Module):
    """Attention to channels by a convolution over them."""

    def __init__(self, joined: bool = False) -> None:
        super().__init__()
        self.joined = joined
        self.left, self.right = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 16, 1)
        self.over, self.head = nn.Conv1d(1, 1, 5, padding=2, bias=False), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.left(x), self.right(x)
        y = torch.cat([y, z], 1) if self.joined else y * z
        y = y * self.over(y.mean((2, 3))[:, None])[:, 0, :, None, None]
        head: Tensor = self.head(y[:, :16] + y[:, 16:] if self.joined else y)
        return head


def test_a_convolution_over_channels() -> None:
    x = torch.randn(2, 3, 4, 4)
    model, original = converted(Neighbours(), x, 1)
    assert aw.plan_of(model).elastic_layers() == (2, 4)
    assert_agrees(model, x)
    assert_is_whole_with_zeros(model, original, x)
    # Where one part ends, the next would be nearer than it is in the whole network.
    fixed = aw.plan(Neighbours(joined=True), x).group("left").fixed
    assert "convolved" in str(fixed)


def test_positions_of_a_learned_picture_stay() -> None:
    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picture = nn.Parameter(torch.randn(1, 16, 8, 8))
            self.conv, self.style = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(5, 16)
            self.head = nn.Linear(16, 3)

        def forward(self, z: Tensor) -> Tensor:
            picture = self.conv(self.picture).relu().mean((2, 3))
            head: Tensor = self.head(picture * self.style(z))
            return head

    z = torch.randn(2, 5)
    model, original = converted(Picture(), z, 2)
    assert extract_quietly(model, 0.5).picture.shape == (1, 8, 8, 8)
    assert_is_whole_with_zeros(model, original, z)


class Modulated(nn.Module):
    """A weight for each example: all of them in one convolution, a group each."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(24, 4, 1)
        self.style, self.weight = nn.Linear(5, 16), nn.Parameter(torch.randn(24, 16, 3, 3))
        self.transposed = transposed

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        y = self.stem(x)
        b, c, h, w = y.shape
        weight = self.weight * self.style(z).view(b, 1, c, 1, 1)
        together = y.reshape(1, b * c, h, w)
        if self.transposed:
            weight = weight.transpose(1, 2).reshape(b * c, -1, 3, 3)
            y = F.conv_transpose2d(together, weight, padding=1, groups=b)
        else:
            y = F.conv2d(together, weight.view(-1, c, 3, 3), padding=1, groups=b)
        head: Tensor = self.head(y.view(b, -1, h, w))
        return head


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("examples", [2, 3])
def test_a_group_for_each_example(transposed: bool, examples: int) -> None:
    inputs = torch.randn(examples, 3, 4, 4), torch.randn(examples, 5)
    model, original = converted(Modulated(transposed), inputs, 2)
    assert aw.plan_of(model).elastic_layers() == (3, 4)
    assert_agrees(model, *inputs)
    assert_is_whole_with_zeros(model, original, *inputs)
    small = extract_quietly(model, 0.5)
    assert aw.macs(model, 0.5) == counted(small, *(x[:1] for x in inputs))


class GroupedTwice(nn.Module):
    """Both groups read the same channels, so both narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
        self.grouped = nn.Conv2d(32, 24, 1, groups=2)
        self.back = nn.ConvTranspose2d(48, 16, 2, 2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = self.grouped(torch.cat([y, y.relu()], 1))
        head: Tensor = self.head(self.back(torch.cat([y, -y], 1)))
        return head


def test_groups_that_read_the_same_channels() -> None:
    x = torch.randn(2, 3, 4, 4)
    model, original = converted(GroupedTwice(), x, 2)
    assert aw.plan_of(model).elastic_layers() == (3, 4)
    assert_agrees(model, x)
    assert_is_whole_with_zeros(model, original, x)
    small = extract_quietly(model, 0.5)
    assert aw.macs(model, 0.5) == counted(small, x[:1])
    assert (small.grouped.in_channels, small.grouped.out_channels) == (16, 12)
    assert (small.back.in_channels, small.back.out_channels) == (24, 8)
    assert small.grouped.groups == small.back.groups == 2


def test_what_training_alone_returns_keeps_its_size() -> None:
    """Features for a loss of their own: nothing that evaluation reads is unused."""

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            features = self.embed(self.stem(x).relu())
            return (self.head(features), features) if self.training else self.head(features)

    x = torch.randn(2, 6)
    model = aw.slimmable(Embedding(), None, aw.WidthRange(0.25, 1.0, 2), example_input=x)
    plan = aw.plan_of(model)
    assert "training" in str(plan.group("embed").fixed)
    assert plan.can_narrow("stem")
    with aw.at_width(model, 0.25):
        assert model.train()(x)[1].shape == (2, 8)


def test_a_plan_notes_cuts_inside_units() -> None:
    """Of three units of four channels, two are cut elsewhere than three are."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 3, 1), nn.Conv2d(6, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            first, second = torch.stack([y, -y, 2 * y, y.relu()], 2).flatten(1, 2).chunk(2, 1)
            head: Tensor = self.head(first * second)
            return head

    x = torch.randn(2, 3, 4, 4)
    model, original = converted(Halves(), x, 1)
    (note,) = aw.plan_of(model).notes
    assert "chunk" in note
    assert_agrees(model, x)
    with pytest.raises(AssertionError):
        assert_is_whole_with_zeros(model, original, x)
