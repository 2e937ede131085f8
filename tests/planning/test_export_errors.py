"""What is said of a network that cannot be exported, and what is done so that more can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from agreement import assert_agrees, convert
from torch import Tensor, nn

import anywidth as aw

x = torch.randn(2, 8)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, others: list[Tensor] | None = None) -> Tensor:
        y = self.stem(x)
        return self.head(y * 2) if (y > 0).all() else self.head(y)


def test_an_error_shows_the_line_the_shapes_and_a_cure() -> None:
    with pytest.raises(aw.AnywidthError) as caught:
        aw.plan(Branching(), (x, [x]))
    said = str(caught.value)
    assert f"{__file__}:" in said
    assert "(y > 0).all()" in said
    assert "[(2, 8), [(2, 8)]]" in said
    assert "torch.where" in said
    assert "tensor(" not in said


def test_a_mask_that_only_a_run_makes_is_asked_for() -> None:
    class OwnMask(Branching):
        def forward(self, x: Tensor, mask: Any = None) -> Tensor:
            if mask is None and not torch.compiler.is_compiling():
                mask = x.new_ones(x.shape)
            return self.head(self.stem(x * mask[:]))

    with pytest.raises(aw.AnywidthError, match="attention_mask"):
        aw.plan(OwnMask(), x)
    assert aw.plan(OwnMask(), (x, torch.ones_like(x))).elastic_layers() == (1, 2)


def test_of_experts_looked_up_by_value_another_way_is_named() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads)
    config._experts_implementation = "eager"
    model = transformers.MixtralForCausalLM._from_config(config).eval()
    with pytest.raises(aw.AnywidthError, match="grouped_mm"):
        aw.plan(model, torch.arange(24).view(2, 12))


def test_lazy_parameters_are_to_be_made_first() -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 4))
    with pytest.raises(aw.AnywidthError, match="run it once"):
        aw.plan(model, x)
    model(x)
    assert_agrees(convert(model, x), x)


class FirstRun(nn.Module):
    """Makes a buffer of the size that it first sees."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("scale", None)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        if self.scale is None:
            self.scale = torch.ones(y.shape[1])
        self.seen = y
        return self.head(y * self.scale)


def test_buffers_of_the_first_run_are_to_be_made_first() -> None:
    model = FirstRun()
    with pytest.raises(aw.AnywidthError, match="scale"):
        aw.plan(model, x)
    assert model.scale is None
    assert model.seen is None
    model(x)
    seen = model.seen
    plan = aw.plan(model, x)
    assert model.seen is seen  # not a tensor without values, as torch's export leaves it
    assert plan.tensors["scale"][0] == plan.tensors["stem.weight"][0]


class Masked(nn.Module):
    """torch looks at the mask's values to see whether it is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 32), nn.Linear(32, 12)
        self.inner = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)

    def forward(self, given: Tensor, wanted: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(wanted.shape[1])
        return self.head(self.inner(self.words(given), self.words(wanted), tgt_mask=mask))


def test_masks_are_no_hindrance() -> None:
    words = torch.arange(10).view(2, 5)
    model = convert(Masked().eval(), (words, words))
    elastic, layers = aw.plan_of(model).elastic_layers()
    assert layers - elastic == 1
    assert_agrees(model, words, words)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.words, self.inner = nn.Embedding(12, 32), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.inner(self.words(words), src_key_padding_mask=words == 0)[:, 0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_sequences_keep_an_even_number_of_heads() -> None:
    words = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
    model = convert(Padded().eval(), words)
    assert aw.plan_of(model).group_of("inner.layers.0.linear2").unit == 16
    assert_agrees(model, words)


def test_a_network_that_watches_itself_runs_after_its_plan() -> None:
    """It sets hooks when it first runs, and must know later that they are there."""
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 8, 8, 8],
        num_attention_heads=[2, 2, 2, 2],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=8,
        num_labels=3,
    )
    model = transformers.SegformerForSemanticSegmentation(config).eval()
    images = torch.randn(2, 3, 32, 32)
    plan = aw.plan(model, images)
    assert plan.elastic_share() > 0.9
    assert model(images).logits.shape[:2] == (2, 3)


def test_an_argument_among_others_by_name_is_named() -> None:
    class Others(nn.Module):
        def forward(self, x: Tensor, **others: Any) -> Tensor:
            return x

    with pytest.raises(aw.AnywidthError, match=r"takes use_cache only in \*\*others.*leave it out"):
        aw.plan(Others(), x=torch.randn(2, 3), use_cache=False)
