"""Tools that cannot work on a converted network, or not at all widths, say so with a cure."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.ao.quantization as quantization
from tiny_networks import batches_of, converted
from torch import nn
from torch.ao.quantization.quantize_fx import prepare_fx

import anywidth as aw

IMAGES = batches_of([4])[0]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*observers? :UserWarning"),
]


def dynamic(model: nn.Module) -> nn.Module:
    return quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def static(model: nn.Module) -> Any:
    model = copy.deepcopy(model)
    model.qconfig = quantization.get_default_qconfig("x86")
    return quantization.prepare(model)


def by_graph(model: nn.Module) -> Any:
    mapping = quantization.get_default_qconfig_mapping("x86")
    return prepare_fx(copy.deepcopy(model), mapping, (IMAGES,))


def trace(model: nn.Module) -> Any:
    return torch.jit.trace(model, IMAGES)


@pytest.mark.parametrize("tool", [dynamic, static, by_graph, trace, torch.jit.script])
@pytest.mark.parametrize("is_part", [False, True])
def test_refused_with_a_cure_that_works(tool: Callable[[nn.Module], Any], is_part: bool) -> None:
    model = converted().eval()
    if is_part:
        model = nn.Sequential(model, nn.ReLU()).eval()
    with pytest.raises(aw.AnywidthError, match="extract"):
        tool(model)
    model(IMAGES)
    small = aw.extract(model, 1.0)
    assert tool(small)(IMAGES).shape == (4, 10)


@pytest.mark.parametrize(("limit", "count", "graphs"), [(2, 4, 2), (16, 12, 12)])
def test_torch_compile_at_more_widths_than_its_limit(limit: int, count: int, graphs: int) -> None:
    """A graph per width if the limit allows it, and otherwise a warning."""
    torch._dynamo.reset()
    rows = torch.randn(2, 3)
    model = aw.slimmable(nn.Sequential(nn.Linear(3, 256), nn.Linear(256, 3)), example_input=rows)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter)
    warned = []
    with torch._dynamo.config.patch(recompile_limit=limit):
        for width in torch.linspace(0.25, 1.0, count):
            with aw.at_width(model, width.item()), warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                torch.testing.assert_close(compiled(rows), model(rows))
            warned += ["recompile_limit" in str(one.message) for one in found]
    assert counter.frame_count == graphs
    assert warned == [True] * (count - graphs)
    torch._dynamo.reset()
