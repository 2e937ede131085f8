"""One plain ONNX file with many widths: each branch cuts its weights from shared ones.

It is for runtimes without our code. The input `width` chooses the branch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from anywidth.deploying.exporting import check_format
from anywidth.deploying.shared_weights import Match
from anywidth.deploying.width_graphs import WidthGraph, graphs_in, largest_error, width_graphs
from anywidth.errors import AnywidthError
from anywidth.files import write_atomically
from anywidth.measuring.heartbeat import working
from anywidth.measuring.spectra import check_statistics
from anywidth.planning.modes import evaluating
from anywidth.slimming.state import state_of
from anywidth.translating.deployment import Deployment, Runner
from anywidth.translating.onnx_graphs import open_onnx

WIDTH = "width"
"""The input that chooses a branch: the nearest width runs."""

# The largest protobuf message.
_MOST_BYTES = 2**31 - 1


def write_branches(
    model: nn.Module, deployment: Deployment, path: Path, widths: Sequence[float]
) -> float:
    """Write a converted network at many widths as one ONNX file, and return its largest error.

    The file is read back and compared with the network at every width before it is kept.
    """
    check_format(path)
    if WIDTH in (*deployment.input_names, *deployment.output_names):
        raise AnywidthError(
            f"an input or output is named {WIDTH!r}, like the input that is added: rename it"
        )
    check_statistics(model, widths)
    ordered = sorted(set(widths))
    resolve = state_of(model).resolve
    with evaluating(model):
        configs = [resolve(width) for width in ordered]
        graphs = width_graphs(model, configs, deployment, progress=True)
        with working(f"putting {len(ordered)} widths into one file"):
            content = _encode(ordered, graphs, deployment)
            run = open_onnx(content)
        runners = {width: (width, _at(width, run)) for width in ordered}
        difference = largest_error(model, deployment, runners, path, progress=True)
    write_atomically(path, content)
    return difference


def _encode(widths: Sequence[float], graphs: Sequence[WidthGraph], deployment: Deployment) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    first = graphs[0].proto
    shared = {m.source.name: m.source.whole for g in graphs for m in g.matches.values()}
    branches = [_branch(graph, f"w{number}_") for number, graph in enumerate(graphs)]
    nodes, constants = _choice(widths, branches, list(deployment.output_names))
    body = helper.make_graph(
        nodes,
        "widths",
        [*first.graph.input, helper.make_tensor_value_info(WIDTH, TensorProto.FLOAT, [])],
        list(first.graph.output),
        [*constants, *(numpy_helper.from_array(array, name) for name, array in shared.items())],
    )
    proto = helper.make_model(body, opset_imports=first.opset_import, ir_version=first.ir_version)
    helper.set_model_props(proto, {**deployment.texts(), "widths": json.dumps(list(widths))})
    if proto.ByteSize() > _MOST_BYTES:
        raise AnywidthError(
            f"these widths need {proto.ByteSize() / 1e9:.1f} GB, and an ONNX file has at most 2: "
            "write a bundle (NAME.anywidth) or fewer widths"
        )
    return bytes(proto.SerializeToString())


def _choice(
    widths: Sequence[float], branches: Sequence[Any], outputs: Sequence[str], place: str = ""
) -> tuple[list[Any], list[Any]]:
    """Nodes that find the branch of the nearest width by bisection, and their constants."""
    from onnx import helper, numpy_helper

    middle = len(widths) // 2
    limit = np.float32((widths[middle - 1] + widths[middle]) / 2)
    constant = numpy_helper.from_array(np.array(limit), f"limit{place}")
    is_narrow = helper.make_node("Less", [WIDTH, constant.name], [f"is_narrow{place}"])
    sides = []
    for side, part in (("n", slice(None, middle)), ("w", slice(middle, None))):
        if len(widths[part]) == 1:
            sides.append(branches[part][0])
            continue
        inner = [f"{name}{place}{side}" for name in outputs]
        nodes, constants = _choice(widths[part], branches[part], inner, place + side)
        values = [helper.make_empty_tensor_value_info(name) for name in inner]
        sides.append(helper.make_graph(nodes, f"widths{place}{side}", [], values, constants))
    chosen = helper.make_node(
        "If", [is_narrow.output[0]], list(outputs), then_branch=sides[0], else_branch=sides[1]
    )
    return [is_narrow, chosen], [constant]


def _branch(graph: WidthGraph, prefix: str) -> Any:
    """The graph of a width as a branch with its own names, which cuts its weights itself.

    Whole weights are cut too: onnxruntime prepares a value that a branch computes from a constant,
    but not a constant outside the branch, which makes a pass 1.5 times as long.
    """
    from onnx import GraphProto

    branch = GraphProto()
    branch.CopyFrom(graph.proto.graph)
    given = {one.name for one in branch.input}
    del branch.input[:]
    matched = [tensor for tensor in branch.initializer if tensor.name in graph.matches]
    for tensor in matched:
        branch.initializer.remove(tensor)
    _rename(branch, given, prefix)
    rest = list(branch.node)
    del branch.node[:]
    for name, match in graph.matches.items():
        _cut(branch, prefix + name, match)
    branch.node.extend(rest)
    return branch


def _rename(branch: Any, given: set[str], prefix: str) -> None:
    """Add a prefix to every name, also in inner graphs, except the names of the file's inputs."""

    def own(name: str) -> str:
        return name if not name or name in given else prefix + name

    for graph in graphs_in(branch):
        for one in (*graph.initializer, *graph.input, *graph.output):
            one.name = own(one.name)
        for node in graph.node:
            node.name = own(node.name)
            node.input[:] = [own(name) for name in node.input]
            node.output[:] = [own(name) for name in node.output]


def _cut(branch: Any, name: str, match: Match) -> None:
    """Add the nodes that compute the weight `name` of a width from the shared weight."""
    from onnx import helper, numpy_helper

    def constant(name: str, array: np.ndarray) -> str:
        branch.initializer.append(numpy_helper.from_array(array, name))
        return name

    def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        branch.node.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    value = match.source.name
    for axis, cut in enumerate(match.source.cuts):
        stretches = cut or (((0, match.source.whole.shape[axis]),) if axis == 0 else ())
        parts = []
        for number, (start, length) in enumerate(stretches):
            place = f"{name}/{axis}/{number}"
            ends = {"start": start, "end": start + length, "axis": axis}
            places = [constant(f"{place}/{kind}", np.array([end])) for kind, end in ends.items()]
            parts.append(node("Slice", [value, *places], place))
        if len(parts) > 1:
            parts = [node("Concat", parts, f"{name}/{axis}", axis=axis)]
        value = parts[0] if parts else value
    if match.scale is not None:
        sizes = [-1 if axis == match.axis else 1 for axis in range(match.source.whole.ndim)]
        scale = constant(f"{name}/scale", match.scale.reshape(sizes))
        value = node("Mul", [value, scale], f"{name}/scaled")
    # If the order of the axes does not change, this only gives the weight its name.
    node("Transpose", [value], name, perm=match.order)


def _at(width: float, run: Runner) -> Runner:
    """A runner of the file at a width, which is its last input."""
    return lambda *values: run(*values, torch.tensor(width))
