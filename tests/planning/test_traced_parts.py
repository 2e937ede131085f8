"""What plans make of buffers, regions of a forward, learned tokens, masks."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agrees, assert_gradients, convert, stir
from counting import counted
from torch import Tensor, nn

import anywidth as aw
from anywidth.slimming.extraction import extract_quietly

# ---- buffers -----------------------------------------------------------------------------------


def test_a_buffer_that_takes_no_part_stays_whole() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 2)
            self.register_buffer("anchors", torch.randn(100, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stem(x).relu())

    model = convert(Detector(), torch.randn(2, 8))
    aw.set_width(model, 0.5)
    assert model.anchors.shape == aw.extract(model, 0.5).anchors.shape == (100, 4)
    assert aw.plan_of(model).elastic_layers() == (1, 2)


@pytest.mark.parametrize("norm", [nn.LayerNorm(40), nn.BatchNorm1d(40), nn.Identity()])
def test_a_filter_bank_stays_whole(norm: nn.Module) -> None:
    class Spectrogram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", torch.rand(64, 40))
            self.register_buffer("kernels", torch.rand(10, 1, 1))
            self.norm, self.stem, self.head = norm, nn.Linear(40, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            power = nn.functional.conv1d(x[:, None], self.kernels).square().sum(1)
            return self.head(self.stem(self.norm(power @ self.bank)).relu())

    x = torch.randn(2, 64)
    model = convert(Spectrogram(), x, allow_fixed=True)
    plan = aw.plan_of(model)
    assert [group.name for group in plan.elastic()] == ["stem"]
    with aw.at_width(model, 0.5):
        assert (model.bank.shape, model.kernels.shape) == ((64, 40), (10, 1, 1))
    assert_agrees(model, x)


def test_bags_of_an_embedding_narrow() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags, self.layer = nn.EmbeddingBag(10, 16), nn.Linear(8, 16)
            self.head = nn.Linear(16, 2)

        def forward(self, x: Tensor, indices: Tensor) -> Tensor:
            return self.head(self.layer(x) * self.bags(indices))

    inputs = torch.randn(2, 8), torch.randint(10, (2, 3))
    model = convert(Bags(), inputs)
    assert aw.extract(model, 0.5).bags.embedding_dim == 8
    assert not aw.plan_of(model).notes
    assert_agrees(model, *inputs)


@pytest.mark.parametrize("kind", ["layer", "embedding", "product", "einsum"])
def test_a_buffer_follows_the_channels_that_weights_make(kind: str) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(5, 16), nn.Linear(16, 16)
            self.weight = nn.Parameter(torch.randn(6, 16))
            self.head = nn.Linear(16, 2)
            self.register_buffer("average", torch.randn(16))

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            y = {
                "layer": lambda: self.layer(self.table(index)),
                "embedding": lambda: self.table(index),
                "product": lambda: x @ self.weight,
                "einsum": lambda: torch.einsum("bi,io->bo", x, self.weight),
            }[kind]()
            return self.head(y - self.average)

    inputs = torch.randn(2, 6), torch.tensor([1, 2])
    model = convert(Centred(), inputs)
    with aw.at_width(model, 0.5):
        assert model.average.shape == (8,)
    assert_agrees(model, *inputs)


def test_a_buffer_that_only_training_reads_follows() -> None:
    class Tracked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 2)
            self.register_buffer("average", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            if self.training:
                self.average.lerp_(y.detach().mean(0), 0.1)
            return self.head(y)

    model = convert(Tracked(), torch.randn(2, 8))
    aw.set_width(model, 0.5)
    assert model.average.shape == (8,)


def test_a_buffer_that_training_writes_into_after_a_concatenation() -> None:
    """Its active part would be a copy, and what is written there lost."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 2)
            self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)
            self.register_buffer("average", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            y = torch.cat([self.left(x), self.right(x)], 1)
            if self.training:
                self.average.lerp_(y.detach().mean(0), 0.1)
            return self.head(y - self.average)

    x = torch.randn(2, 8)
    model = convert(Joined(), x)
    plan = aw.plan_of(model)
    assert [group.name for group in plan.elastic()] == ["stem"]
    assert "average" in str(plan.group("left").fixed)
    assert_gradients(model, plan.narrowest, x)


# ---- regions with other settings ---------------------------------------------------------------


class InRegions(nn.Module):
    """Layers under autocast, without gradients and with them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.inner, self.norm, self.last = nn.Conv2d(16, 12, 1), nn.BatchNorm2d(12), nn.ReLU()
        self.frozen, self.open = nn.Conv2d(12, 8, 1), nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        with torch.autocast("cpu", enabled=False):
            y = self.last(self.norm(self.inner(y.float())))
        with torch.no_grad():
            y = self.frozen(y)
            with torch.enable_grad():
                y = self.open(y)
        return self.head(y)


def test_layers_in_regions_are_elastic_and_counted() -> None:
    x = torch.randn(2, 3, 4, 4)
    model = convert(InRegions(), x)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (4, 5)
    assert plan.folds == [("inner", "norm")]
    stir(model, [x])
    assert_agrees(model, x)
    for width in (0.5, 1.0):
        assert aw.macs(model, width) == counted(extract_quietly(model, width).eval(), x[:1])


# ---- internal errors ---------------------------------------------------------------------------


def test_learned_tokens_before_others() -> None:
    class Registers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(6, 32), nn.Linear(32, 3)
            self.tokens = nn.Parameter(torch.randn(1, 8, 32))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(torch.cat([self.tokens.expand(x.shape[0], -1, -1), x], 1)).mean(1)

    x = torch.randn(2, 5, 6)
    model = convert(Registers(), x)
    assert aw.plan_of(model).elastic_layers() == (1, 2)
    assert aw.Plan.from_json(aw.plan_of(model).to_json()) == aw.plan_of(model)
    assert_agrees(model, x)


@pytest.mark.parametrize("merged", [False, True])
def test_learned_tokens_are_no_channels(merged: bool) -> None:
    """As many at every width, and they keep no reshape from letting channels narrow."""

    class Prompts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(6, 32), nn.Linear(32, 3)
            self.tokens = nn.Parameter(torch.randn(1, 8, 32))
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            tokens, x = self.tokens.expand(x.shape[0], -1, -1), self.stem(x)
            asking = torch.cat([tokens, x], 1) if merged else tokens
            return self.head(self.attention(asking, x, x, need_weights=False)[0].mean(1))

    x = torch.randn(2, 5, 6)
    model = convert(Prompts(), x)
    assert aw.plan_of(model).elastic_layers() == (3, 4)
    assert aw.extract(model, 0.5).tokens.shape == (1, 8, 16)
    assert_agrees(model, x)


def test_weight_norm_over_the_whole_weight() -> None:
    wrapped = nn.utils.parametrizations.weight_norm(nn.Linear(3, 16), dim=None)
    x = torch.randn(2, 3)
    model = convert(nn.Sequential(wrapped, nn.ReLU(), nn.Linear(16, 4)), x)
    assert aw.plan_of(model).elastic_layers() == (1, 2)
    assert_agrees(model, x)


# ---- attention ---------------------------------------------------------------------------------


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.stem(x)
        y, _ = self.attention(x, x, x, key_padding_mask=mask, need_weights=False)
        return self.head(x + y)


class CrossAttending(Attending):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        memory = self.stem(memory)
        return self.head(self.attention(self.stem(x), memory, memory, need_weights=False)[0])


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(32, 5)
        layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.head(self.decoder(self.stem(x), self.stem(memory)))


class Queries(nn.Module):
    """Positions of two parts, so that the width of `nn.Transformer` is that of two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(32, 5)
        self.rows = nn.Parameter(torch.randn(7, 16))
        self.columns = nn.Parameter(torch.randn(7, 16))
        self.queries = nn.Parameter(torch.randn(4, 32))
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        asked = self.queries.repeat(x.shape[0], 1, 1)
        x = self.stem(x + memory.mean(1, keepdim=True))
        x = x + torch.cat([self.rows, self.columns], 1)
        return self.head(self.transformer(x, asked))


class PaddedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(32, 5)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(x), src_key_padding_mask=mask))


MASK = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
ATTENDING = {
    "padded": (Attending, MASK, (3, 4)),
    "cross": (CrossAttending, torch.randn(2, 9, 8), (3, 4)),
    "decoder": (Decoder, torch.randn(2, 9, 8), (13, 14)),
    "queries": (Queries, torch.randn(2, 9, 8), (11, 12)),
    "padded_encoder": (PaddedEncoder, MASK, (9, 10)),
}


@pytest.mark.parametrize("name", ATTENDING)
def test_attention_is_elastic(name: str) -> None:
    kind, second, elastic = ATTENDING[name]
    inputs = torch.randn(2, 7, 8), second
    model = convert(kind(), inputs)
    assert aw.plan_of(model).elastic_layers() == elastic
    assert_agrees(model, *inputs)


def test_a_plan_says_which_weights_it_does_not_count() -> None:
    class Solved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.matrix = nn.Linear(8, 16), nn.Parameter(torch.eye(16))

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.solve(self.matrix, self.stem(x).T)

    plan = aw.plan(Solved(), torch.randn(2, 8))
    (note,) = plan.notes
    assert "solve" in note


def test_cost_is_that_of_one_example_however_it_is_given() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.second(self.first(batch["x"]))

    assert aw.macs(aw.plan(Named(), ({"x": torch.randn(3, 8)},)), 1.0) == 8 * 16 + 16 * 4


def test_a_plan_says_which_statistics_all_widths_share() -> None:
    class OwnNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))
            self.register_buffer("shift", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return x - self.mean + self.shift
            mean = x.mean(0)
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
            return x - mean + self.shift

    model = nn.Sequential(nn.Linear(8, 16), OwnNorm(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    (note,) = aw.plan(model, torch.randn(2, 8)).notes
    assert "1.mean" in note
