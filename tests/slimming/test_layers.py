"""Every kind of layer narrows itself, and its extracted twin computes the same."""

from __future__ import annotations

import pytest
import torch
from agreement import (
    assert_agrees,
    assert_close,
    assert_gradients,
    configurations,
    convert,
    stir,
)
from layer_networks import IMAGE, NETWORKS, Attention, Words, hook_weight_norm, image_chain
from torch import Tensor, nn

import anywidth as aw
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.norm_statistics import new_statistics, uncalibrated_allowed


@pytest.mark.parametrize("name", NETWORKS)
def test_layer_agrees_with_its_twin(name: str) -> None:
    model, shape = NETWORKS[name]()
    x = torch.randn(shape)
    before = model.eval()(x)
    convert(model, x)
    elastic, layers = aw.plan_of(model).elastic_layers()
    assert elastic == layers - 1
    assert torch.equal(model.eval()(x), before)
    stir(model, [x])
    assert_agrees(model, x)
    for config in configurations(model):
        assert_gradients(model, config, x)


def test_embedding_narrows_its_features() -> None:
    words = torch.randint(0, 11, (2, 7))
    model = convert(Words(), words)
    assert_agrees(model, words)
    with aw.at_width(model, 0.5):
        assert model.embed.embedding_dim == 8
        assert model.embed.num_embeddings == 11
    assert_gradients(model, aw.plan_of(model).narrowest, words)


def test_attention_narrows_by_whole_heads() -> None:
    model = convert(Attention(), torch.randn(2, 5, 6))
    assert aw.plan_of(model).group_of("embed").unit == 4
    with aw.at_width(model, 0.5):
        attention = model.attention
        assert (attention.num_heads, attention.embed_dim, attention.head_dim) == (2, 8, 4)
        assert attention.in_proj_weight.shape == (24, 8)


def test_attributes_show_the_active_sizes() -> None:
    model = convert(image_chain(nn.Conv2d(16, 24, 3, groups=4), nn.BatchNorm2d(24), out=24),
                    torch.randn(IMAGE))  # fmt: skip
    with aw.at_width(model, 0.5):
        grouped = model[1]
        assert (grouped.in_channels, grouped.out_channels, grouped.groups) == (8, 12, 2)
        assert model[2].num_features == 12
    assert (grouped.in_channels, grouped.out_channels, grouped.groups) == (16, 24, 4)


# ---- output averaging ----------------------------------------------------------------------------


WRAPPERS = {
    "plain": lambda layer: layer,
    "parametrized": nn.utils.parametrizations.weight_norm,
    "hook": hook_weight_norm,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("normed", [False, True], ids=["alone", "with_batch_norm"])
def test_output_averaging(wrapper: str, normed: bool) -> None:
    wrap = WRAPPERS[wrapper]
    x = torch.randn(IMAGE)
    layers = [nn.BatchNorm2d(8)] if normed else []
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1), wrap(nn.Conv2d(16, 8, 3)), *layers, nn.ReLU(), nn.Conv2d(8, 4, 1)
    )
    convert(model, x, average_outputs=True)
    stir(model, [x])
    assert_agrees(model, x)
    model.eval()
    config = aw.plan_of(model).narrowest
    with aw.at_width(model, config), uncalibrated_allowed(model), torch.no_grad():
        sliced = model(x)
        assert_close(sliced, extract_quietly(model, config, fold=True)(x), 1e-4)


def test_output_averaging_scales_before_the_bias() -> None:
    """Appendix of the paper: the sum over inputs times full over active inputs, then the bias."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    x = torch.randn(5, 4)
    convert(model, x, aw.WidthRange(0.25, 1.0, 1), average_outputs=True)
    with aw.at_width(model, 0.25), torch.no_grad():
        inner = x @ model[0]._parameters["weight"][:2].T + model[0]._parameters["bias"][:2]
        weight, bias = model[1]._parameters["weight"], model[1]._parameters["bias"]
        torch.testing.assert_close(model(x), inner @ weight[:, :2].T * (8 / 2) + bias)


def test_depthwise_outputs_are_not_averaged() -> None:
    model = image_chain(nn.Conv2d(16, 16, 3, groups=16))
    plan = aw.plan(model, torch.randn(IMAGE))
    assert "1.weight" not in plan.inputs
    assert "2.weight" in plan.inputs


def test_a_tied_embedding_is_not_averaged() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(11, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.mix(self.embed(x)).relu())

    words = torch.randint(11, (2, 5))
    model = convert(Tied(), words, average_outputs=True)
    with aw.at_width(model, 0.5), torch.no_grad():
        assert torch.equal(model.embed(words), model.embed._parameters["weight"][words][..., :8])
        assert model.mix.weight[0, 0] == 2 * model.mix._parameters["weight"][0, 0]


# ---- batch-norm statistics ---------------------------------------------------------------------


def test_uncalibrated_width_raises_and_names_the_fix() -> None:
    x = torch.randn(IMAGE)
    model = convert(image_chain(nn.BatchNorm2d(16)), x)
    model(x)
    model.eval()
    with aw.at_width(model, 0.5), pytest.raises(aw.AnywidthError, match="calibrate"):
        model(x)
    model(x)


def test_training_tracks_the_ends_and_leaves_other_widths_alone() -> None:
    x = torch.randn(IMAGE)
    model = convert(image_chain(nn.BatchNorm2d(16)), x).train()
    norm, full = model[1], model[1]._buffers["running_mean"].clone()
    for width in (0.25, 0.5):
        with aw.at_width(model, width):
            model(x)
    assert torch.equal(norm._buffers["running_mean"], full)
    model.eval()
    with aw.at_width(model, 0.25):
        assert norm.running_mean.shape == (4,)
        assert norm.running_mean.any()
        model(x)


def test_new_statistics_are_those_of_a_new_norm() -> None:
    model = convert(image_chain(nn.BatchNorm2d(16)), torch.randn(IMAGE))
    with aw.at_width(model, 0.5):
        entry, fresh = new_statistics(model[1], 0.5), nn.BatchNorm2d(8)
    assert torch.equal(entry.running_mean, fresh.running_mean)
    assert torch.equal(entry.running_var, fresh.running_var)
    assert not entry.ready


# ---- no stale weights ----------------------------------------------------------------------------


def test_a_changed_weight_is_seen_at_once() -> None:
    x = torch.randn(IMAGE)
    model = convert(image_chain(nn.ReLU()), x).eval()
    aw.set_width(model, 0.5)
    with torch.no_grad():
        model(x)
        model[0].weight.mul_(2)
        assert_close(model(x), extract_quietly(model, 0.5)(x))
        model[0]._parameters["weight"].data = torch.randn(16, 3, 3, 3)
        assert_close(model(x), extract_quietly(model, 0.5)(x))
        model[0]._parameters["weight"].data.zero_()
        assert not model[0].weight.any()
        model[0].weight = nn.Parameter(torch.randn(16, 3, 3, 3))
        assert_close(model(x), extract_quietly(model, 0.5)(x))


def test_kept_views_do_not_leak_into_training() -> None:
    x = torch.randn(IMAGE)
    model = convert(image_chain(nn.ReLU()), x)
    aw.set_width(model, 0.5)
    with torch.inference_mode():
        model(x)
    with torch.no_grad():
        model(x)
    model(x).sum().backward()
    assert model[0]._parameters["weight"].grad[:8].any()
