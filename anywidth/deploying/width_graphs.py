"""A network at one width as a graph without weights: it says which of the full network's to cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from anywidth.deploying.deployment import Deployment
from anywidth.deploying.shared_weights import Match, match, sources
from anywidth.slimming.extraction import extract
from anywidth.slimming.state import state_of
from anywidth.width import Width


@dataclass(frozen=True)
class WidthGraph:
    """One width's graph, an `onnx.ModelProto`.

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


def width_graph(model: nn.Module, width: Width, deployment: Deployment) -> WidthGraph:
    """A converted network at one width, norms merged, as a graph without the shared weights."""
    from onnx import numpy_helper

    proto = deployment.to_onnx(extract(model, width, fold=True))
    state = state_of(model)
    candidates = sources(model, state.plan, state.resolve(width))
    matches = {}
    for tensor in proto.graph.initializer:
        found = match(tensor.name, numpy_helper.to_array(tensor), candidates)
        if found is not None:
            matches[tensor.name] = found
            tensor.ClearField("raw_data")
    _strip(proto)
    return WidthGraph(proto, matches)


def _strip(proto: Any) -> None:
    """Leaves out where in the Python code each node came from: most of the graph's bytes."""
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
