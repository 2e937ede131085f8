"""Decoders of transformers, tiny: all narrows but the rows of the vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from agreement import assert_agrees, assert_close
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

import anywidth as aw
from anywidth.planning.trace import graph
from anywidth.planning.trace.nodes import layer_of

WORDS = torch.arange(24).view(2, 12) % 32
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}


def built(name: str, **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.eval()


def logits(model: nn.Module, words: Tensor = WORDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(words).logits
    return found


# Heads of 8 channels, as many as there are heads, or of another size than hidden / heads.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Llama", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 8}),
        ("Mistral", {}),
        ("Gemma", {"head_dim": 8}),
        ("Phi", {}),
        ("Phi3", {}),
        ("Phi3", {"num_key_value_heads": 8}),
        ("GPTNeoX", {}),
        ("Falcon", {"multi_query": False, "alibi": False}),
    ],
)
def test_whole_heads_narrow(name: str, sizes: dict[str, Any]) -> None:
    """With the cache that is on by default, which is no output to keep."""
    model = built(name, **sizes)
    assert model.config.use_cache
    before = logits(model)
    aw.slimmable(model, aw.plan(model, WORDS), aw.WidthRange(0.25, 1.0, 4), strict=True)
    plan = aw.plan_of(model)
    elastic, layers = plan.elastic_layers()
    assert elastic == layers - 1
    assert torch.equal(logits(model), before)
    for width in (0.25, 0.5, 0.7):
        with aw.at_width(model, width):
            assert_close(logits(model), logits(aw.extract(model, width)))


def test_keys_keep_their_ratio_to_queries_and_heads_their_size() -> None:
    model = built("Llama")
    aw.slimmable(model, aw.plan(model, WORDS), aw.WidthRange(0.25, 1.0, 4), strict=True)
    plan = aw.plan_of(model)
    attention = plan.group_of("model.layers.0.self_attn.q_proj")
    # Two heads of queries for one of keys and values: four channels each.
    assert (attention.unit, attention.channels) == (8, 32)
    assert attention.name != plan.group_of("model.layers.1.self_attn.q_proj").name
    small = aw.extract(model, 0.5)
    own = small.model.layers[0].self_attn
    rows = (own.q_proj.out_features, own.k_proj.out_features, own.v_proj.out_features)
    assert rows == (16, 8, 8)
    assert own.head_dim == 4
    assert own.scaling == 4**-0.5
    assert torch.equal(small.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_a_narrow_decoder_writes_with_its_cache() -> None:
    model = built("Llama")
    aw.slimmable(model, aw.plan(model, WORDS), aw.WidthRange(0.25, 1.0, 4))
    words = WORDS[:1, :4]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with aw.at_width(model, 0.5):
        cached = model.generate(words, **options)
        again = model.generate(words, use_cache=False, **options)
    assert torch.equal(cached, again)
    assert torch.equal(cached, aw.extract(model, 0.5).generate(words, **options))


@pytest.fixture
def noticed_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.15: a wrong number of heads fails in the product after attention alone."""

    def last_of_layers(error: Any, narrow: Any, nodes: list[Node], guesses: Any) -> list[Node]:
        attention = [n for n in nodes if n in guesses and layer_of(n).endswith("self_attn")]
        return list({layer_of(node): node for node in attention}.values())

    monkeypatch.setattr(graph, "blamed_guesses", last_of_layers)


@pytest.mark.usefixtures("noticed_late")
@pytest.mark.parametrize("keys", [4, 8])
def test_a_failure_doubts_guesses_further_back(keys: int) -> None:
    model = built("Phi3", num_key_value_heads=keys)
    aw.slimmable(model, aw.plan(model, WORDS), aw.WidthRange(0.25, 1.0, 4), strict=True)
    elastic, layers = aw.plan_of(model).elastic_layers()
    assert elastic == layers - 1


def test_a_number_of_the_shared_configuration_follows_each_layer() -> None:
    """Phi-3 slices its queries by `config.num_attention_heads`, one object for all layers."""
    model = built("Phi3")
    shared = model.config
    aw.slimmable(model, aw.plan(model, WORDS), aw.WidthRange(0.25, 1.0, 4), strict=True)
    plan = aw.plan_of(model)
    first, second = (plan.group_of(f"model.layers.{i}.self_attn.qkv_proj").name for i in range(2))
    attentions = [layer.self_attn for layer in model.model.layers]
    with aw.at_width(model, {first: 0.5, second: 0.25}):
        heads = [(a.config.num_attention_heads, a.config.hidden_size) for a in attentions]
        assert heads == [(4, 32), (2, 32)]
        found = logits(model)
    assert_close(found, logits(aw.extract(model, {first: 0.5, second: 0.25})))
    assert shared.num_attention_heads == 8
    assert all(attention.config is shared for attention in attentions)
    twin = copy.deepcopy(model)
    aw.set_width(twin, 0.5)
    aw.set_width(twin, 1.0)
    assert all(layer.self_attn.config is twin.config for layer in twin.model.layers)


GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 2}
FUSED = "transformer.h.1.self_attention.query_key_value"


@pytest.mark.parametrize(
    ("name", "sizes", "fused", "rows"),
    [
        # Four of eight heads, of four channels each, and the keys and values of all.
        ("GPTBigCode", {"multi_query": True}, "transformer.h.1.attn.c_attn", 16 + 4 + 4),
        ("Falcon", {"multi_query": True}, FUSED, 16 + 4 + 4),
        # One of two groups: four heads, and their keys and values.
        ("Falcon", GROUPS, FUSED, 16 + 4 + 4),
    ],
)
def test_queries_narrow_that_share_keys_in_a_fused_layer(
    name: str, sizes: dict[str, Any], fused: str, rows: int
) -> None:
    model = built(name, **sizes)
    before = logits(model)
    aw.slimmable(model, aw.plan(model, WORDS), aw.WidthRange(0.25, 1.0, 4), strict=True)
    assert torch.equal(logits(model), before)
    assert aw.extract(model, 0.5).get_submodule(fused).weight.shape[0] == rows
    for width in (0.25, 0.5):
        with aw.at_width(model, width):
            assert_close(logits(model), logits(aw.extract(model, width)))


@pytest.mark.parametrize("groups", [1, 2])
def test_heads_of_a_state_space_narrow(groups: int) -> None:
    """Mamba-2: each group of states has as many heads, and its norm the channels of a group."""
    sizes = {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": groups, "chunk_size": 4}
    model = built("Mamba2", **sizes)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) * 0.1)
    before = logits(model)
    aw.slimmable(model, aw.plan(model, WORDS), aw.WidthRange(0.25, 1.0, 4), strict=True)
    assert torch.equal(logits(model), before)
    small = aw.extract(model, 0.5)
    mixer = small.backbone.layers[0].mixer
    assert (mixer.num_heads, mixer.intermediate_size) == (4, 32)
    assert mixer.norm.group_size == 32 // groups
    assert mixer.A_log.shape == mixer.D.shape == (4,)
    for width in (0.25, 0.5):
        with aw.at_width(model, width):
            assert_close(logits(model), logits(aw.extract(model, width)))


def test_interleaved_gates_of_experts_narrow_in_pairs() -> None:
    """GPT-OSS: gates are every second channel. Kernels of experts read 16 bytes at once."""
    model = built("GptOss", num_local_experts=2, num_experts_per_tok=1, head_dim=8)
    before = logits(model)
    aw.slimmable(model, aw.plan(model, WORDS), aw.WidthRange(0.25, 1.0, 4), strict=True)
    assert torch.equal(logits(model), before)
    group = aw.plan_of(model).group_of("model.layers.0.mlp.experts.gate_up_proj")
    assert (group.fixed, group.unit) == (None, 16)
    for width in (0.25, 0.6):
        with aw.at_width(model, width):
            assert_close(logits(model), logits(aw.extract(model, width)))


def test_attentions_on_one_residual_are_groups_of_their_own() -> None:
    """GPT-2: `Conv1D` sizes its output, and fused queries, keys and values are cut, by numbers."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **ENDS)).eval()
    before = logits(model)
    aw.slimmable(model, aw.plan(model, WORDS), aw.WidthRange(0.25, 1.0, 4), strict=True)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (8, 9)
    names = {plan.group_of(f"transformer.h.{i}.attn.c_attn").name for i in range(2)}
    residual = plan.group_of("transformer.h.0.attn.c_proj").name
    assert len(names | {residual}) == 3
    assert torch.equal(logits(model), before)
    with aw.at_width(model, 0.5):
        assert model.transformer.h[0].attn.split_size == 16
        assert_close(logits(model), logits(aw.extract(model, 0.5)))


class NanoAttention(nn.Module):
    """Queries, keys and values in one layer, cut and put back with the width of the residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        projected: Tensor = self.c_proj(y)
        return projected


class ConfiguredAttention(NanoAttention):
    """All sizes are those of a configuration."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config.width, config.heads)
        del self.n_head, self.n_embd
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.size()
        heads = self.config.heads
        q, k, v = self.c_attn(x).split(self.config.width, dim=2)
        q, k, v = (y.view(b, t, heads, -1).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.c_proj(y.transpose(1, 2).reshape(b, t, self.config.width))
        return projected


class Nano(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module] = lambda: NanoAttention(32, 4)) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.attentions = nn.ModuleList(attention() for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for attention, up, down in zip(self.attentions, self.up, self.down, strict=True):
            x = x + attention(x)
            x = x + down(F.gelu(up(x)))
        found: Tensor = self.head(x)
        return found


def test_all_layers_of_a_decoder_narrow_that_reads_its_configuration() -> None:
    config = SimpleNamespace(width=32, heads=4, dropout=0.1)
    model = Nano(lambda: ConfiguredAttention(config))
    aw.slimmable(model, aw.plan(model, WORDS), aw.WidthRange(0.25, 1.0, 4), strict=True)
    assert aw.plan_of(model).elastic_layers() == (8, 9)
    assert_agrees(model, WORDS)
    assert vars(config) == {"width": 32, "heads": 4, "dropout": 0.1}


def test_all_layers_of_a_decoder_written_by_hand_narrow() -> None:
    model = Nano()
    aw.slimmable(model, aw.plan(model, WORDS), aw.WidthRange(0.25, 1.0, 4), strict=True)
    assert aw.plan_of(model).elastic_layers() == (8, 9)
    assert_agrees(model, WORDS)
