"""Graphs of widths between two converted ones are what a conversion gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import convert, stir
from onnx import numpy_helper
from torch import Tensor, nn

import anywidth as aw
from anywidth.translating.called_network import described
from anywidth.translating.deployment import Deployment
from anywidth.translating.onnx_graphs import onnx_graphs, open_onnx

EXAMPLE = torch.randn(2, 3, 8, 8)


class Depthwise(nn.Module):
    """Sizes of axes are in attributes (groups) and in constants (the flattened features)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, stride=2, groups=16)
        self.last = nn.Linear(16 * 3 * 3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.norm(self.first(x)).relu()).flatten(1))


class Scaled(nn.Module):
    """A number that changes with the width and is no size of an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h / h.shape[1] ** 0.5)


class Biased(nn.Module):
    """Attention with a learned bias, whose parts in ONNX have other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 96), nn.Linear(32, 5)
        self.bias = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.first(x).chunk(3, -1))
        bias = self.bias.expand(x.shape[0], -1, -1, -1)
        found = nn.functional.scaled_dot_product_attention(*heads, attn_mask=bias)
        return self.last(found.transpose(1, 2).flatten(2))


class Decomposed(nn.Module):
    """ONNX has no singular values, and no complex numbers."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 16)
        self.is_complex = is_complex

    def forward(self, x: Tensor) -> Tensor:
        found = self.last(self.first(x).relu())
        if self.is_complex:
            return torch.fft.rfft(found)
        return torch.linalg.svdvals(found.unflatten(1, (4, 4)))


def conversions(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Every network that is converted from now on."""
    found: list[nn.Module] = []
    to_onnx = Deployment.to_onnx

    def counted(self: Deployment, network: nn.Module, **options: Any) -> Any:
        found.append(network)
        return to_onnx(self, network, **options)

    monkeypatch.setattr(Deployment, "to_onnx", counted)
    return found


def prepared(model: nn.Module) -> tuple[nn.Module, Deployment, list[aw.ChannelConfig]]:
    convert(model, EXAMPLE)
    stir(model, [EXAMPLE])
    plan = aw.plan_of(model)
    configs = [plan.resolve(width) for width in (0.25, 0.5, 1.0)]
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        aw.calibrate(model, [EXAMPLE + 1], widths=configs)
    names = {"input_names": None, "output_names": None, "wrap": None, "facts": None}
    return model.eval(), described(model, None, **names), configs


def as_numbers(proto: Any) -> tuple[list[Any], dict[str, Any]]:
    nodes = [(n.op_type, n.input, n.output, list(n.attribute)) for n in proto.graph.node]
    values = {t.name: numpy_helper.to_array(t).tolist() for t in proto.graph.initializer}
    return nodes, values


def test_widths_between_two_need_no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    model, deployment, configs = prepared(Depthwise())
    converted = conversions(monkeypatch)
    found = list(onnx_graphs(model, configs, deployment))
    assert len(converted) == 2
    for config, proto in zip(configs, found, strict=True):
        network = aw.extract(model, config, fold=True)
        true = deployment.to_onnx(network, weights_as_they_are=True)
        assert as_numbers(proto) == as_numbers(true)
        assert proto.graph.output == true.graph.output


def test_what_is_more_than_a_size_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, deployment, configs = prepared(Scaled())
    converted = conversions(monkeypatch)
    found = list(onnx_graphs(model, configs, deployment))
    assert len(converted) == len(configs)
    for config, proto in zip(configs, found, strict=True):
        network = aw.extract(model, config, fold=True)
        true = deployment.to_onnx(network, weights_as_they_are=True)
        assert as_numbers(proto) == as_numbers(true)


def test_a_graph_that_disagrees_with_the_network_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, deployment, configs = prepared(Depthwise())
    converted = conversions(monkeypatch)

    def off(narrow: Any, wide: Any, sizes: Any, network: nn.Module) -> Any:
        (weight,) = (t for t in wide.graph.initializer if t.name.endswith("last.bias"))
        weight.CopyFrom(numpy_helper.from_array(np.ones(5, np.float32), weight.name))
        return wide

    monkeypatch.setattr("anywidth.translating.onnx_graphs.graph_between", off)
    list(onnx_graphs(model, configs, deployment))
    assert len(converted) == len(configs)


def test_attention_with_a_learned_bias_is_converted() -> None:
    model, example = Biased(), torch.randn(2, 6, 8)
    convert(model, example)
    names = {"input_names": None, "output_names": None, "wrap": None, "facts": None}
    deployment = described(model.eval(), None, **names)
    configs = [aw.plan_of(model).resolve(width) for width in (0.25, 1.0)]
    for config, proto in zip(configs, onnx_graphs(model, configs, deployment), strict=True):
        with aw.at_width(model, config):
            assert deployment.check(model, open_onnx(proto.SerializeToString()), "net") < 1e-5


@pytest.mark.parametrize(("is_complex", "word"), [(False, "svd"), (True, "view_as_real")])
def test_what_onnx_does_not_have_is_named(tmp_path: Path, is_complex: bool, word: str) -> None:
    model = convert(Decomposed(is_complex), torch.randn(2, 8))
    with pytest.raises(aw.AnywidthError, match=word):
        aw.export_bundle(model, tmp_path / "net.anywidth", [0.5, 1.0], progress=False)
    assert not list(tmp_path.iterdir())
