"""A converted network at many widths as ONNX graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.slimming.convert import at_width
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.state import state_of
from anywidth.translating.deployment import Deployment, Runner
from anywidth.translating.graphs_between import (
    DifferentGraphsError,
    Sizes,
    graph_between,
    sizes_between,
)
from anywidth.width import ChannelConfig

# The largest error of a graph that was not translated itself.
_CLOSE = 1e-4
# For nonuniform widths; each guess is checked.
_GUESSES = 6


def onnx_graphs(
    model: nn.Module, configs: Sequence[ChannelConfig], deployment: Deployment
) -> Iterator[Any]:
    """The graphs of a converted network in evaluation mode, with folded norms and weights.

    The narrowest and the widest are translated. The others are made from these two if possible,
    and compared with the network.
    """
    plan = state_of(model).plan
    narrow, wide = min(configs, key=plan.macs), max(configs, key=plan.macs)
    translated = {
        config: deployment.to_onnx(
            extract_quietly(model, config, fold=True), weights_as_they_are=True
        )
        for config in {narrow, wide}
    }
    for config in configs:
        if config in translated:
            yield translated[config]
            continue
        network = extract_quietly(model, config, fold=True)
        ends = translated[narrow], translated[wide]
        sizes = sizes_between(plan, narrow, wide, config)
        for one in _unambiguous(sizes):
            with contextlib.suppress(DifferentGraphsError):
                proto = graph_between(*ends, one, deployment.wrap(network))
                if _agrees(model, config, deployment, proto):
                    yield proto
                    break
        else:
            yield deployment.to_onnx(network, weights_as_they_are=True)


def _unambiguous(sizes: Sizes) -> Iterator[Sizes]:
    """All guesses, if axes that are alike at both ends differ in between."""
    most = max(map(len, sizes.values()), default=1)
    for guess in range(min(most, _GUESSES)):
        yield {ends: {sorted(found)[guess % len(found)]} for ends, found in sizes.items()}


def open_onnx(content: bytes) -> Runner:
    """A function that runs an ONNX file with onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # only errors
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(*values: Tensor) -> list[Tensor]:
        feeds = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        return [torch.as_tensor(output) for output in session.run(None, feeds)]

    return run


def _agrees(model: nn.Module, config: ChannelConfig, deployment: Deployment, proto: Any) -> bool:
    try:
        run = open_onnx(proto.SerializeToString())
        with at_width(model, config):
            return deployment.check(model, run, "") < _CLOSE
    except Exception:  # onnxruntime's errors for wrong sizes have no common class
        return False
