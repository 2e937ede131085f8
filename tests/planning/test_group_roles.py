"""`plan.only`: presets for what narrows, in decoders and vision transformers nobody here wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from agreement import assert_agrees
from test_decoders import ENDS, GPT2, SIZES, WORDS, Nano
from torch import Tensor, nn

import anywidth as aw

IMAGES = torch.randn(2, 3, 16, 16)
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
}


def llama() -> tuple[nn.Module, Tensor]:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), WORDS


def gpt2() -> tuple[nn.Module, Tensor]:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **ENDS)), WORDS


def vit() -> tuple[nn.Module, Tensor]:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VIT)), IMAGES


def torchvision_vit() -> tuple[nn.Module, Tensor]:
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
    return torchvision.models.VisionTransformer(16, 8, **sizes), IMAGES


def timm_vit() -> tuple[nn.Module, Tensor]:
    sizes = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return timm.models.VisionTransformer(16, **sizes), IMAGES


def nano() -> tuple[nn.Module, Tensor]:
    return Nano(), WORDS


NETWORKS = [llama, gpt2, vit, torchvision_vit, timm_vit, nano]


def narrowed(model: nn.Module, example: Tensor, *roles: str) -> aw.Plan:
    """The plan of the network, converted so that only these roles narrow."""
    plan = aw.plan(model.eval(), example)
    plan.only(*roles)
    aw.slimmable(model, plan, aw.WidthRange(0.25, 1.0, 4), strict=True, allow_fixed=True)
    return aw.plan_of(model)


def narrow_sizes(plan: aw.Plan) -> set[tuple[int, int]]:
    """(channels at half the width, all channels) of every group that is narrower."""
    half = plan.resolve(0.5)
    groups = plan.groups.values()
    return {(half[g.name], g.channels) for g in groups if half[g.name] < g.channels}


@pytest.mark.parametrize("make", NETWORKS)
def test_the_mlp_alone_narrows(make: Any) -> None:
    model, example = make()
    plan = narrowed(model, example, "mlp")
    wide = {48, 128, 64}
    assert narrow_sizes(plan) <= {(n // 2, n) for n in wide}
    assert len(plan.elastic()) == 2, "one per block"
    assert_agrees(model, example)


@pytest.mark.parametrize("make", [llama, gpt2, vit, timm_vit])
def test_heads_alone_narrow(make: Any) -> None:
    model, example = make()
    plan = narrowed(model, example, "heads")
    assert narrow_sizes(plan) == {(16, 32)}
    assert [group.unit for group in plan.elastic()] == [8, 8]
    assert_agrees(model, example)


@pytest.mark.parametrize("make", [llama, gpt2, vit, timm_vit])
def test_the_residual_alone_narrows(make: Any) -> None:
    model, example = make()
    plan = narrowed(model, example, "hidden")
    assert [(group.channels, group.unit) for group in plan.elastic()] == [(32, 1)]
    assert_agrees(model, example)


def test_roles_that_narrow_as_one_are_named_together() -> None:
    """torch's own attention has one size for its heads and for the residual."""
    model, example = torchvision_vit()
    plan = aw.plan(model, example)
    before = plan.copy()
    for role in ("heads", "hidden"):
        with pytest.raises(aw.AnywidthError, match=r'only\("heads", "hidden"\)'):
            plan.only(role)
    assert plan == before, "a refused edit changes nothing"
    plan.only("hidden", "heads")
    assert [group.name for group in plan.elastic()] == ["conv_proj"]


def test_heads_that_the_code_sizes_by_the_residual_do_not_narrow_alone() -> None:
    """nanoGPT cuts its heads by the width of its input, which the graph does not show."""
    model, example = nano()
    plan = aw.plan(model, example)
    plan.only("heads")
    with pytest.raises(aw.AnywidthError, match="nothing"):
        aw.slimmable(model, plan, aw.WidthRange(0.25, 1.0, 4))


def test_two_roles() -> None:
    plan = aw.plan(*llama())
    plan.only("mlp", "heads")
    assert narrow_sizes(plan) == {(16, 32), (24, 48)}
    assert "only mlp and heads narrow" in str(plan)


def test_shared_layers_have_their_roles() -> None:
    """ALBERT runs one block several times."""
    sizes = {"embedding_size": 16, "intermediate_size": 48, "num_attention_heads": 4,
             "num_hidden_layers": 3}  # fmt: skip
    config = transformers.AlbertConfig(vocab_size=32, hidden_size=32, **sizes)
    plan = aw.plan(transformers.AlbertModel(config).eval(), WORDS)
    found = {g.channels: g.roles for g in plan.groups.values() if g.fixed is None}
    assert found == {16: (), 32: ("heads",), 48: ("mlp",)}


def test_heads_that_all_blocks_share_are_no_residual() -> None:
    """T5 adds one table of positions, with an entry per head, to the scores of every block."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=32, **sizes)).eval()
    plan = narrowed(model, WORDS, "heads")
    assert [(group.channels, group.roles) for group in plan.elastic()] == [(32, ("heads",))]


def test_embeddings_that_are_compared_are_no_heads() -> None:
    """CLIP multiplies its embeddings of texts and of images with each other."""
    text = {**VIT, "vocab_size": 32, "max_position_embeddings": 16, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=VIT, projection_dim=24)
    model = transformers.CLIPModel(config).eval()
    plan = aw.plan(model, input_ids=WORDS, pixel_values=IMAGES)
    found = {(g.channels, g.roles) for g in plan.groups.values()}
    assert found == {(24, ()), (32, ("heads",)), (32, ("hidden",)), (48, ("mlp",))}


@pytest.mark.parametrize(
    ("roles", "word"), [((), "mlp"), (("attention",), "attention"), (("mlp", "layers"), "layers")]
)
def test_unknown_roles_are_refused(roles: tuple[str, ...], word: str) -> None:
    with pytest.raises(aw.AnywidthError, match=word):
        aw.plan(*nano()).only(*roles)


def test_a_network_without_the_role_is_refused() -> None:
    plan = aw.plan(torchvision.models.resnet18(), IMAGES)
    with pytest.raises(aw.AnywidthError, match="role 'mlp'"):
        plan.only("mlp")


def test_a_role_that_cannot_narrow_is_refused_with_its_reason() -> None:
    plan = aw.plan(*llama())
    for group in plan.elastic():
        if "heads" in group.roles:
            plan.pin(group.name, "wanted whole")
    with pytest.raises(aw.AnywidthError, match="wanted whole"):
        plan.only("heads")


def test_a_tie_to_a_group_that_would_stay_is_refused() -> None:
    plan = aw.plan(*gpt2())
    plan.tie("transformer.h.0.mlp.c_fc", "transformer.h.0.attn.c_proj", 4)
    with pytest.raises(aw.AnywidthError, match="tied"):
        plan.only("mlp")
    plan.only("mlp", "hidden")
    assert plan.resolve(0.5)["transformer.h.0.mlp.c_fc"] == 64


def test_the_plan_of_a_converted_network_is_not_edited() -> None:
    model, example = nano()
    plan = narrowed(model, example, "mlp")
    with pytest.raises(aw.AnywidthError, match="copy"):
        plan.only("heads")


def test_roles_are_saved_and_printed() -> None:
    plan = aw.plan(*nano())
    again = aw.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    again.only("mlp")
    assert len(again.elastic()) == 2
    assert "role" in str(plan)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    assert "role" not in str(aw.plan(plain, torch.ones(2, 4)))
