"""Sorted channels: the most important first, and the network computes what it did."""

from __future__ import annotations

import pytest
import torch
import torchvision
from agreement import stir
from layer_networks import NETWORKS
from torch import Tensor, nn

import anywidth as aw


def important_last() -> nn.Sequential:
    """Its later channels carry more: of 8, the last is the most important."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    with torch.no_grad():
        model[0].weight *= torch.arange(1.0, 9.0).view(8, 1, 1, 1)
        model[2].weight *= torch.arange(1.0, 9.0).view(1, 8, 1, 1)
    return model


def example() -> Tensor:
    return torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_layer_computes_the_same(name: str) -> None:
    model, shape = NETWORKS[name]()
    x = torch.randn(shape)
    stir(model, (x,))
    model.eval()
    with torch.no_grad():
        before = model(x)
        aw.sort_channels(model, example_input=x)
        torch.testing.assert_close(model(x), before, atol=1e-4, rtol=1e-4)


def test_the_most_important_come_first() -> None:
    model = important_last()
    weights = model[0].weight.detach().clone()
    aw.sort_channels(model, example_input=example())
    norms = model[0].weight.detach().square().sum((1, 2, 3)) / weights.square().sum()
    norms += model[2].weight.detach().square().sum((0, 2, 3)) / model[2].weight.square().sum()
    assert torch.equal(norms, norms.sort(descending=True).values)
    assert not torch.equal(model[0].weight, weights)


def test_narrow_widths_keep_more_of_the_output() -> None:
    x, gaps = example(), []
    for is_sorted in (False, True):
        torch.manual_seed(1)
        model = important_last()
        if is_sorted:
            aw.sort_channels(model, example_input=x)
        aw.slimmable(model, None, aw.WidthRange(0.5, 1.0, 1), example_input=x)
        with torch.no_grad(), aw.at_width(model, 0.5):
            narrow = model(x)
        gaps.append(float((narrow - model(x)).detach().abs().mean()))
    assert gaps[1] < 0.7 * gaps[0]


def test_importance_can_be_given() -> None:
    model = important_last()
    weights = model[0].weight.detach().clone()
    aw.sort_channels(model, importance={"0": torch.arange(8)}, example_input=example())
    assert torch.equal(model[0].weight, weights.flip(0))


def test_a_head_of_zeros_hides_nothing() -> None:
    model = torchvision.models.shufflenet_v2_x1_0(num_classes=4).eval()
    nn.init.zeros_(model.fc.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(aw.AnywidthError, match="cannot be sorted"):
        aw.sort_channels(model, example_input=torch.randn(2, 3, 64, 64))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_group_left_out_stays_in_order() -> None:
    model, x = important_last(), example()
    plan = aw.plan(model, x)
    plan.pin("0")
    weights = model[0].weight.detach().clone()
    aw.sort_channels(model, plan)
    assert torch.equal(model[0].weight, weights)


@pytest.mark.parametrize(
    ("importance", "word"),
    [({"0": torch.ones(3)}, "8"), ({"0": torch.full((8,), torch.nan)}, "finite"),
     ({"nothing": torch.ones(8)}, "nothing"), ({"2": torch.ones(2)}, "fixed")],
)  # fmt: skip
def test_bad_importance_changes_nothing(importance, word: str) -> None:
    model = important_last()
    weights = model[0].weight.detach().clone()
    with pytest.raises(aw.AnywidthError, match=word):
        aw.sort_channels(model, importance=importance, example_input=example())
    assert torch.equal(model[0].weight, weights)


def test_bad_networks_are_named() -> None:
    with pytest.raises(aw.AnywidthError, match="example"):
        aw.sort_channels(important_last())
    model = aw.slimmable(important_last(), example_input=example())
    with pytest.raises(aw.AnywidthError, match="converted"):
        aw.sort_channels(model, example_input=example())
