"""A network at many widths as graphs without weights, and how each weight is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from anywidth.deploying.shared_weights import Match, match, sources
from anywidth.measuring.shown_progress import tracked_if_shown
from anywidth.slimming.convert import at_width
from anywidth.slimming.state import state_of
from anywidth.translating.deployment import Deployment, Runner
from anywidth.translating.onnx_graphs import onnx_graphs
from anywidth.width import ChannelConfig, Width


@dataclass(frozen=True)
class WidthGraph:
    """The graph of one width, an `onnx.ModelProto`.

    Initializers in `matches` have no values in the graph; all others do.
    """

    proto: Any
    matches: Mapping[str, Match]

    def without_weights(self) -> bytes:
        """The graph for the runtime, in which shared weights are external."""
        import onnx
        from anywidth_runtime.harmless_graphs import LOCATION

        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        for tensor in proto.graph.initializer:
            if tensor.name in self.matches:
                tensor.data_location = onnx.TensorProto.EXTERNAL
                entry = tensor.external_data.add()
                entry.key, entry.value = "location", LOCATION.decode()
        return bytes(proto.SerializeToString())


def width_graphs(
    model: nn.Module, configs: Sequence[ChannelConfig], deployment: Deployment, progress: bool
) -> list[WidthGraph]:
    """The graphs of a converted network in evaluation mode, with folded norms, without weights."""
    steps = tracked_if_shown(configs, "converting widths", progress)
    converted = zip(steps, onnx_graphs(model, configs, deployment), strict=True)
    return [_without_shared(model, config, proto) for config, proto in converted]


def largest_error(
    model: nn.Module,
    deployment: Deployment,
    runners: Mapping[Any, tuple[Width, Runner]],
    path: Path,
    progress: bool,
) -> float:
    """Compare a written file with the network at every width; see `Deployment.check`.

    `runners` has, by the name of a width, the width and a function that runs the file at it.
    """
    errors = []
    for name, (width, run) in tracked_if_shown(runners.items(), "checking widths", progress):
        with at_width(model, width):
            errors.append(deployment.check(model, run, f"{path}, width {name}"))
    return max(errors)


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
    # The Python source of each node is most of the graph's bytes.
    del found.metadata_props[:]
    for graph in graphs_in(found.graph):
        del graph.value_info[:], graph.metadata_props[:]
        for one in (*graph.input, *graph.output, *graph.initializer, *graph.node):
            del one.metadata_props[:]
            one.ClearField("doc_string")
    return WidthGraph(found, matches)


def graphs_in(graph: Any) -> Iterator[Any]:
    """A graph and all graphs inside its nodes."""
    yield graph
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from graphs_in(inner)
