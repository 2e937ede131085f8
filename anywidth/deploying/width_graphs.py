"""A network at many widths as graphs without weights: each says which of the full ones to cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from anywidth.deploying.deployment import Deployment
from anywidth.deploying.exporting import open_onnx
from anywidth.deploying.graphs_between import DifferentGraphsError, graph_between, sizes_between
from anywidth.deploying.shared_weights import Match, match, sources
from anywidth.measuring.cost import macs
from anywidth.slimming.convert import at_width
from anywidth.slimming.extraction import extract
from anywidth.slimming.state import state_of
from anywidth.width import ChannelConfig

# A graph that was not converted itself has to agree with the network this closely.
_CLOSE = 1e-4


@dataclass(frozen=True)
class WidthGraph:
    """The graph of one width, an `onnx.ModelProto`.

    The initializers that `matches` names hold no values; all others are in the graph.
    """

    proto: Any
    matches: Mapping[str, Match]

    def without_weights(self) -> bytes:
        """The graph as the runtime takes it: shared weights come from outside."""
        import onnx
        from anywidth_runtime.onnx_graphs import LOCATION

        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        for tensor in proto.graph.initializer:
            if tensor.name in self.matches:
                tensor.data_location = onnx.TensorProto.EXTERNAL
                entry = tensor.external_data.add()
                entry.key, entry.value = "location", LOCATION.decode()
        return bytes(proto.SerializeToString())


def width_graphs(
    model: nn.Module, configs: Sequence[ChannelConfig], deployment: Deployment
) -> Iterator[WidthGraph]:
    """The graphs of a converted network in evaluation mode, norms merged, without weights."""
    for config, proto in zip(configs, onnx_graphs(model, configs, deployment), strict=True):
        yield _without_shared(model, config, proto)


def onnx_graphs(
    model: nn.Module, configs: Sequence[ChannelConfig], deployment: Deployment
) -> Iterator[Any]:
    """The graphs of a converted network in evaluation mode, norms merged, weights inside.

    The narrowest and the widest are converted. The others are made from these two where possible,
    and compared with the network.
    """
    state = state_of(model)
    ends = sorted(set(configs), key=lambda config: macs(model, config))
    narrow, wide = ends[0], ends[-1]
    converted = {
        config: deployment.to_onnx(extract(model, config, fold=True)) for config in {narrow, wide}
    }
    for config in configs:
        if config in converted:
            yield converted[config]
            continue
        network = extract(model, config, fold=True)
        sizes = sizes_between(state.plan, narrow, wide, config)
        with contextlib.suppress(DifferentGraphsError):
            wrapped = deployment.wrap(network)
            proto = graph_between(converted[narrow], converted[wide], sizes, wrapped)
            if _agrees(model, config, deployment, proto):
                yield proto
                continue
        yield deployment.to_onnx(network)


def _agrees(model: nn.Module, config: ChannelConfig, deployment: Deployment, proto: Any) -> bool:
    try:
        run = open_onnx(proto.SerializeToString())
        with at_width(model, config):
            return deployment.check(model, run, "") < _CLOSE
    except Exception:  # what onnxruntime raises for sizes that do not fit has no common class
        return False


def _without_shared(model: nn.Module, config: ChannelConfig, proto: Any) -> WidthGraph:
    import onnx
    from onnx import numpy_helper

    found = onnx.ModelProto()
    found.CopyFrom(proto)
    candidates = sources(model, state_of(model).plan, config)
    matches = {}
    for tensor in found.graph.initializer:
        matched = match(tensor.name, numpy_helper.to_array(tensor), candidates)
        if matched is not None:
            matches[tensor.name] = matched
            tensor.ClearField("raw_data")
    _strip(found)
    return WidthGraph(found, matches)


def _strip(proto: Any) -> None:
    """Leave out where in the Python code each node came from: most of the graph's bytes."""
    del proto.metadata_props[:]
    _strip_graph(proto.graph)


def _strip_graph(graph: Any) -> None:
    del graph.value_info[:]
    del graph.metadata_props[:]
    for one in (*graph.input, *graph.output, *graph.initializer, *graph.node):
        del one.metadata_props[:]
        one.ClearField("doc_string")
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _strip_graph(inner)
