"""Networks of transformers other than decoders, and mixtures of experts, tiny."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from agreement import assert_agrees, assert_close, convert
from torch import Tensor, nn

import anywidth as aw

WORDS = torch.arange(24).view(2, 12) % 32
ENDS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = {
    **ENDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
}
BOTH = {
    **ENDS,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 16,
}
T5 = {**ENDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
MAMBA = {**ENDS, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4, "use_cache": False}


def built(kind: str, config: str, **sizes: Any) -> nn.Module:
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    return model.eval()


def assert_narrows(model: nn.Module, whole_layers: int, **named: Any) -> None:
    """All but so many layers narrow; the whole network stays, and a narrow one is the extracted."""
    with torch.no_grad():
        before = model(**named).logits
        plan = aw.plan(model, **named)
        aw.slimmable(model, plan, aw.WidthRange(0.25, 1.0, 4), strict=True)
        elastic, layers = aw.plan_of(model).elastic_layers()
        assert layers - elastic == whole_layers
        assert torch.equal(model(**named).logits, before)
        for width in (0.25, 0.7):
            with aw.at_width(model, width):
                assert_close(model(**named).logits, aw.extract(model, width)(**named).logits)


@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm"])
def test_experts_narrow_but_not_how_many_there_are(way: str) -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    config._experts_implementation = way
    model = transformers.MixtralForCausalLM._from_config(config).eval()
    # The words' rows, and in each layer the number that an expert is chosen by.
    assert_narrows(model, 3, input_ids=WORDS)
    small = aw.extract(model, 0.5).model.layers[0].mlp
    assert small.experts.down_proj.shape == (4, 16, 24)
    assert small.gate.weight.shape == (4, 16)
    assert any("hidden_dim" in note for note in aw.plan_of(model).notes)


class Chosen(nn.Module):
    """Each expert reads the rows that chose it: how many these are depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(8, 32), nn.Linear(32, 3), nn.Linear(32, 4)
        kinds = (nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(3))
        self.experts = nn.ModuleList(kinds)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        weights, chosen = self.router(y).softmax(-1).topk(1, -1)
        mixed = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen[:, 0] == number).squeeze(1)
            mixed = mixed.index_add(0, rows, expert(y[rows]) * weights[rows])
        return self.head(y + mixed)


def test_experts_that_look_their_rows_up_narrow() -> None:
    x = torch.randn(6, 8)
    model = convert(Chosen(), x)
    assert aw.plan_of(model).elastic_layers() == (7, 9)
    assert_agrees(model, x)


def test_experts_in_one_parameter_that_are_looked_up_narrow() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.router, self.head = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(32, 4)
            self.up = nn.Parameter(torch.randn(4, 32, 48) / 8)
            self.down = nn.Parameter(torch.randn(4, 48, 32) / 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            weights, chosen = self.router(y).softmax(-1).topk(2, -1)
            inner = torch.einsum("bh,bkhf->bkf", y, self.up[chosen]).relu()
            mixed = torch.einsum("bkf,bkfh->bkh", inner, self.down[chosen])
            return self.head(y + (mixed * weights[..., None]).sum(1))

    x = torch.randn(6, 8)
    model = convert(Looked(), x)
    assert aw.extract(model, 0.5).up.shape == (4, 16, 24)
    assert_agrees(model, x)


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_hidden_states_beside_logits_hold_no_layer_back(name: str) -> None:
    sizes = BOTH if name == "Bart" else T5
    kind = f"{name}ForConditionalGeneration"
    model = built(kind, f"{name}Config", **sizes, decoder_start_token_id=0)
    assert_narrows(model, 1, input_ids=WORDS, decoder_input_ids=WORDS)
    plan = aw.plan_of(model)
    assert any("encoder_last_hidden_state" in note for note in plan.notes)


RWKV = {**ENDS, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}
XLNET = {**ENDS, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64}


def test_states_for_the_next_call_hold_no_layer_back() -> None:
    model = built("RwkvForCausalLM", "RwkvConfig", **RWKV)
    assert_narrows(model, 1, input_ids=WORDS, use_cache=True)
    assert any("state, returned beside logits" in note for note in aw.plan_of(model).notes)
    model = built("XLNetLMHeadModel", "XLNetConfig", **XLNET)
    assert_narrows(model, 1, input_ids=WORDS, use_mems=True)
    assert any("mems, returned beside logits" in note for note in aw.plan_of(model).notes)


def test_hidden_states_alone_are_what_a_network_says() -> None:
    sizes = {**SIZES, "intermediate_size": 64}
    plan = aw.plan(built("BertModel", "BertConfig", **sizes), WORDS)
    assert plan.group_of("encoder.layer.0.output.dense").fixed is not None


def test_scores_looked_up_by_distance_narrow_with_their_heads() -> None:
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    model = built("DebertaV2ForSequenceClassification", "DebertaV2Config", **sizes, **DEBERTA)
    assert_narrows(model, 1, input_ids=WORDS)


def test_a_state_space_narrows_in_all_its_uneven_parts() -> None:
    model = built("MambaForCausalLM", "MambaConfig", **MAMBA)
    assert_narrows(model, 1, input_ids=WORDS)


ALIBI = {
    "Bloom": {**ENDS, "hidden_size": 64, "n_head": 4, "n_layer": 1},
    "Mpt": {**ENDS, "d_model": 64, "n_heads": 4, "n_layers": 1, "max_seq_len": 16},
}


@pytest.mark.parametrize("name", ALIBI)
def test_heads_that_differ_by_constants_stay_and_their_features_narrow(name: str) -> None:
    model = built(f"{name}ForCausalLM", f"{name}Config", **ALIBI[name])
    before = {type(m).__name__: vars(m).get("head_dim") for m in model.modules()}
    assert_narrows(model, 1, input_ids=WORDS, use_cache=False)
    plan = aw.plan_of(model)
    assert plan.held_back() == []
    small = aw.extract(model, 0.5)
    sizes = {type(m).__name__: vars(m).get("head_dim") for m in small.modules()}
    attention = f"{name}Attention"
    assert (before[attention], sizes[attention]) == (16, 8)
