"""Convolutions that normalise their weight before they use it: inputs and kernel are one axis."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import assert_agrees, assert_gradients, convert
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import anywidth as aw

x = torch.randn(2, 3, 6, 6)


class ByBatchNorm(nn.Conv2d):
    """As in timm's normaliser-free networks."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, padding=self.padding)


class ByHand(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.flatten(1)
        rows = (rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-5)
        return F.conv2d(x, rows.view_as(self.weight), self.bias, padding=self.padding)


@pytest.mark.parametrize("kind", [ByBatchNorm, ByHand])
@pytest.mark.parametrize("is_normed", [False, True])
def test_inputs_of_a_normalised_weight_narrow(kind: type[nn.Conv2d], is_normed: bool) -> None:
    inner = kind(16, 16, 3, padding=1)
    inner = weight_norm(inner) if is_normed else inner
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), inner, nn.ReLU(), nn.Conv2d(16, 4, 1))
    before = model.eval()(x)
    convert(model, x)
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    assert torch.equal(model(x), before)
    assert aw.extract(model, 0.5)[2].weight.shape == (8, 8, 3, 3)
    assert_agrees(model, x)
    assert_gradients(model, aw.plan_of(model).narrowest, x)


class Scaled(nn.Conv2d):
    """With an equalized learning rate, or as in timm's normaliser-free networks, with a gain."""

    def __init__(self, channels: int, gain: float) -> None:
        super().__init__(channels, channels, 3, padding=1)
        self.factor = gain / math.sqrt(self.weight[0].numel())

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.factor, self.bias, padding=self.padding)


@pytest.mark.parametrize("gain", [1.0, math.sqrt(2), 1.7])
def test_a_scale_by_the_number_of_inputs_follows_the_width(gain: float) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), Scaled(16, gain), nn.ReLU(), nn.Conv2d(16, 4, 1))
    before = model.eval()(x)
    convert(model, x)
    assert torch.equal(model(x), before)
    narrow = aw.extract(model, 0.5)[1]
    assert narrow.factor == pytest.approx(gain / math.sqrt(8 * 9))
    assert_agrees(model, x)


CASES = [(3, 1.7), (1, 1.0)]
"""Sizes of kernels and gains."""


def test_timm_scales_its_normalised_weights_for_the_width() -> None:
    layers = pytest.importorskip("timm.layers")
    first, second = (layers.ScaledStdConv2d(16, 16, k, padding=k // 2, gamma=g) for k, g in CASES)
    last = nn.Conv2d(16, 4, 1)
    inner = (first, nn.ReLU(), second, nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), *inner, last)
    convert(model.eval(), x)
    # The second has as many outputs as inputs, and these narrow otherwise.
    config = aw.ChannelConfig((("0", 8), ("2", 4), ("4", 12), ("6", 4)))
    for layer, (_, gain) in zip(aw.extract(model, config)[2:6:2], CASES, strict=True):
        assert layer.scale == pytest.approx(gain / math.sqrt(layer.weight[0].numel()))
    assert_agrees(model, x)


def test_a_factor_that_has_nothing_to_do_with_the_inputs_stays() -> None:
    inner = Scaled(16, 1.0)
    inner.factor = 0.01
    model = nn.Sequential(nn.Conv2d(3, 16, 1), inner, nn.ReLU(), nn.Conv2d(16, 4, 1))
    convert(model.eval(), x)
    assert aw.extract(model, 0.5)[1].factor == 0.01
