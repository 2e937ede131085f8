"""Numbers worked out from how many channels there are: they follow the width, or it is noted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_close, convert
from torch import Tensor, nn

import anywidth as aw
from anywidth.slimming.extraction import extract_quietly


class Scaled(nn.Module):
    """Two layers, with a number between that depends on the width between them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scaled(self.stem(x)))

    def scaled(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class RootOfAttribute(Scaled):
    def __init__(self, width: int = 64) -> None:
        super().__init__(width)
        self.width = width

    def scaled(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.width**0.5


class RootKept(Scaled):
    def __init__(self, width: int = 64) -> None:
        super().__init__(width)
        self.scale = width**0.5

    def scaled(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale


class SumOverSize(RootOfAttribute):
    def scaled(self, x: Tensor) -> Tensor:
        return x - (x.sum(-1) / self.width)[..., None]


class InverseRoot(RootOfAttribute):
    """A norm by hand; the number is a power of the attribute."""

    def scaled(self, x: Tensor) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True) * self.width**-0.5 + 1e-6)


class Scores(Scaled):
    """Attention of one head, whose features are all channels."""

    def __init__(self, width: int = 64) -> None:
        super().__init__(width)
        self.keys = nn.Linear(width, width)
        self.softness = width**-0.5

    def scaled(self, x: Tensor) -> Tensor:
        return (x @ self.keys(x).mT * self.softness).softmax(-1) @ x


class FusedScores(Scores):
    def scaled(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, self.keys(x), x, scale=self.softness)


class ByItsInverse(Scores):
    def scaled(self, x: Tensor) -> Tensor:
        return (x @ self.keys(x).mT / (1 / self.softness)).softmax(-1) @ x


class AboveTheModule(nn.Module):
    """The number is kept by the module around, as by T5's."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.model_dim, self.stem, self.head = width, nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x) * self.model_dim**-0.5)


class ScaledEmbedding(nn.Embedding):
    """As Gemma's: a buffer that no checkpoint holds."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__(count, width)
        self.register_buffer("scale", torch.tensor(width**0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.to(self.weight.dtype)


class Buffered(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.table, self.head = ScaledEmbedding(10, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.argmax(-1)))


class TimesAnotherNumber(RootOfAttribute):
    def scaled(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * (0.5 * self.width**0.5)


class OtherPower(RootOfAttribute):
    def scaled(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.width**1.5 / 64


class AddedAndRaised(RootOfAttribute):
    def scaled(self, x: Tensor) -> Tensor:
        return x.abs() ** (2 - 8 / self.width) + 3 / self.width


class WeightOfATerm(RootOfAttribute):
    def scaled(self, x: Tensor) -> Tensor:
        return torch.lerp(torch.add(x, x.square(), alpha=4 / self.width), x, self.width**-0.5)


class InAList(Scaled):
    def __init__(self, width: int = 64) -> None:
        super().__init__(width)
        self.widths = [width, 8]

    def scaled(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.widths[0] ** 0.5


KINDS = [RootOfAttribute, TimesAnotherNumber, OtherPower, AddedAndRaised, WeightOfATerm, InAList,
         RootKept, SumOverSize, InverseRoot, Scores, FusedScores, ByItsInverse, AboveTheModule,
         Buffered]  # fmt: skip

x = torch.randn(2, 5, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_an_extracted_network_is_the_same_code_built_narrower(kind: type[nn.Module]) -> None:
    whole = kind().eval()
    before = whole(x)
    model = convert(whole, x)
    assert_close(model(x), before, tolerance=0)
    for width in (0.25, 0.5):
        small = extract_quietly(model, width)
        built = kind(int(64 * width)).eval()
        built.load_state_dict(small.state_dict())
        assert_close(small(x), built(x))
    assert_agrees(model, x)
    aw.set_width(model, 1.0)
    assert_close(model(x), before, tolerance=0)


@pytest.mark.parametrize("kind", [RootKept, Buffered])
def test_a_saved_plan_keeps_what_follows(kind: type[nn.Module]) -> None:
    model = kind()
    plan = aw.Plan.from_json(aw.plan(model, x).to_json())
    assert plan == aw.plan(model, x)


def test_a_number_written_into_the_code_is_noted_and_warned_of() -> None:
    class Literal(Scaled):
        def scaled(self, x: Tensor) -> Tensor:
            return F.normalize(x, dim=-1) * 8.0

    with pytest.warns(UserWarning, match="64"):
        plan = aw.plan(Literal(), x)
    assert any("64" in note for note in plan.notes)
    assert plan.group_of("stem").fixed is None


def test_a_tensor_of_one_number_is_noted_and_warned_of() -> None:
    class Held(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor(8.0)  # neither a parameter nor a buffer

        def scaled(self, x: Tensor) -> Tensor:
            return self.scale * F.normalize(x, dim=-1)

    with pytest.warns(UserWarning, match="64"):
        plan = aw.plan(Held(), x)
    assert plan.group_of("stem").fixed is None


def test_a_number_that_cannot_follow_is_noted_with_its_size() -> None:
    class Both(RootOfAttribute):
        """64 is also how many steps there are, so that the attribute cannot follow the width."""

        def scaled(self, x: Tensor) -> Tensor:
            steps = x.new_ones(x.shape[1], 64).view(x.shape[1], self.width)
            return F.normalize(x, dim=-1) * (3 * self.width**0.5) * steps.mean()

    with pytest.warns(UserWarning, match="24, which comes from 64"):
        aw.plan(Both(), x)


def test_a_number_worked_out_from_a_shape_needs_nothing() -> None:
    class FromShape(RootOfAttribute):
        def scaled(self, x: Tensor) -> Tensor:
            return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5

    model = convert(FromShape(), x)
    assert not aw.plan_of(model).notes
    assert aw.extract(model, 0.5).width == 64  # nothing reads it


def test_a_size_that_is_also_used_otherwise_stays() -> None:
    class Both(RootOfAttribute):
        """64 is also how many steps a table has."""

        def __init__(self, width: int = 64) -> None:
            super().__init__(width)
            self.table = nn.Parameter(torch.randn(64, 8))

        def forward(self, x: Tensor) -> Tensor:
            steps = self.table.view(self.width, 2, 4).mean((0, 1)).sum()
            return super().forward(x) + steps

    with pytest.warns(UserWarning, match="64"):
        model = convert(Both(), x)
    assert aw.extract(model, 0.5).stem.out_features == 32
    assert_agrees(model, x)


class TwoScores(nn.Module):
    """Scores of content and of position, added and then scaled, as in XLNet."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Parameter(torch.randn(16, 2, 16) / 4) for _ in range(2))
        self.first = nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(2, 16))
        self.scale = 16**-0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k = (torch.einsum("bih,hnd->bind", x, w) for w in (self.q, self.k))
        content = torch.einsum("bind,bjnd->bnij", q, k)
        position = torch.einsum("bind,bjnd->bnij", q + self.bias, k.flip(1))
        return ((content + position) * self.scale).softmax(-1).sum(1)


def test_the_scale_of_a_sum_of_scores_follows_their_features() -> None:
    model = TwoScores()
    aw.slimmable(model, aw.plan(model, torch.randn(2, 5, 16)), aw.WidthRange(0.25, 1.0, 4))
    plan = aw.plan_of(model)
    group = next(s.group for axis in plan.tensors["bias"][1:] for s in axis or ())
    with aw.at_width(model, {group: 0.25}):
        assert model.bias.shape == (2, 4)
        assert model.scale == 4**-0.5
    assert model.scale == 16**-0.5


class AsManyHeads(nn.Module):
    """As many heads as each has features, by which the scores are scaled."""

    def __init__(self, kind: str, heads: int = 8) -> None:
        super().__init__()
        self.kind, self.num_heads, self.head_dim = kind, heads, 8
        self.stem, self.head = nn.Linear(16, 64), nn.Linear(64, 4)
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(8))
        self.register_buffer("mask", torch.zeros(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        shape = (*x.shape[:-1], self.num_heads, self.head_dim)
        q, k, v = (layer(x).view(shape) for layer in (self.q, self.k, self.v))
        if self.kind == "einsum":
            scores = torch.einsum("bihd,bjhd->bhij", q, k)
        else:
            q = self.gain * q if self.kind == "gain" else q
            scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
        scores = scores + self.mask if self.kind == "mask" else scores
        mixed = (scores / self.head_dim**0.5).softmax(-1) @ v.transpose(1, 2)
        return self.head(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["einsum", "gain", "mask"])
def test_a_number_of_features_that_stays_is_not_taken_for_the_heads(kind: str) -> None:
    model = convert(AsManyHeads(kind), torch.randn(2, 5, 16))
    assert not any("same number" in note for note in aw.plan_of(model).notes)
    assert aw.extract(model, 0.5).num_heads == 4


BEFORE_SCORES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "fourth roots": lambda q, n: q * (2 * n**-0.25),
    "root": lambda q, n: q * n**-0.5,
    "divided": lambda q, n: q / n**0.5,
    "normalized": lambda q, n: F.normalize(q, dim=-1) * n**0.5,
}


@pytest.mark.parametrize("name", BEFORE_SCORES)
def test_a_number_of_features_as_many_as_heads_stays(name: str) -> None:
    """Eight heads of eight features: the number may come from either, and only heads narrow."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = 8
            self.stem, self.head = nn.Linear(8, 192), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.stem(x).view(*x.shape[:2], -1, 24).transpose(1, 2).chunk(3, -1)
            scores = BEFORE_SCORES[name](q, self.features) @ k.mT
            return self.head((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    model = convert(Attention(), x)
    small = aw.extract(model, 0.25)
    assert small.stem.out_features == 48
    assert small.features == 8
    assert_agrees(model, x)


def test_a_number_of_channels_as_many_as_places_follows() -> None:
    model = convert(RootOfAttribute(), torch.randn(2, 64, 8))
    assert aw.extract(model, 0.25).width == 16
