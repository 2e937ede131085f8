"""Graphs of widths between two converted ones are what a conversion gives."""

from __future__ import annotations

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
from anywidth.translating.onnx_graphs import onnx_graphs

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


def conversions(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Every network that is converted from now on."""
    found: list[nn.Module] = []
    to_onnx = Deployment.to_onnx

    def counted(self: Deployment, network: nn.Module) -> Any:
        found.append(network)
        return to_onnx(self, network)

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
        true = deployment.to_onnx(aw.extract(model, config, fold=True))
        assert as_numbers(proto) == as_numbers(true)
        assert proto.graph.output == true.graph.output


def test_what_is_more_than_a_size_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, deployment, configs = prepared(Scaled())
    converted = conversions(monkeypatch)
    found = list(onnx_graphs(model, configs, deployment))
    assert len(converted) == len(configs)
    for config, proto in zip(configs, found, strict=True):
        true = deployment.to_onnx(aw.extract(model, config, fold=True))
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
