"""Operations that are the only readers of a layer's or a batch norm's output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from anywidth.planning.trace.exported_graphs import Exports
from anywidth.planning.trace.nodes import layer_of, nodes_of, op_name
from anywidth.planning.trace.trace_findings import Maker

ACTIVATIONS = ("relu", "relu6", "hardtanh", "silu", "hardswish")

Pairs = list[tuple[str, str]]
Chains = list[tuple[str, str, str]]


def folds(makers: Sequence[Maker], exported: Any) -> Pairs:
    """(layer, batch norm) in which only the norm reads the layer's output.

    Nothing else may read the parameters of either, because folding changes them. `makers` are the
    calls of layers in this graph.
    """
    times = Counter(maker.layer for maker in makers)
    layers = {m.node: m.layer for m in makers if m.can_fold and m.layer and times[m.layer] == 1}
    found = []
    for norm in _norms(exported):
        read = norm.args[0]
        if not isinstance(read, Node) or read not in layers or not layer_of(norm):
            continue
        if len(read.users) == 1 and _reads_alone(read) and _reads_alone(norm):
            found.append((layers[read], layer_of(norm)))
    return found


def _reads_alone(call: Node) -> bool:
    """Whether no other operation reads the parameters of a call."""
    return all(len(one.users) == 1 for one in call.all_input_nodes if one is not call.args[0])


def joins(exports: Exports) -> tuple[Pairs, Chains, list[str]]:
    """(batch norm, activation), triples with the convolution that alone reads the activation, and
    batch norms that only a sum reads.

    They are joined in training, where there may be other operations in between and other readers.
    """
    graph = exports.first
    pairs = [
        (layer_of(norm), layer_of(reader))
        for norm, reader in _read_alone(graph)
        if op_name(reader.target) in ACTIVATIONS and layer_of(norm) and layer_of(reader)
    ]
    summed = _sums(graph)
    training = exports.get(True) if pairs or summed else None
    if training is None:
        return [], [], []  # nothing is known, so nothing is joined
    in_training = set(_sums(training))
    joined = {(layer_of(norm), layer_of(reader)) for norm, reader in _read_alone(training)}
    chains = set(_prologues(training))
    return (
        [pair for pair in pairs if pair in joined],
        [chain for chain in _prologues(graph) if chain in chains and chain[:2] in joined],
        [norm for norm in summed if norm in in_training],
    )


def _norms(exported: Any) -> list[Node]:
    """Batch norms that are called once."""
    nodes = nodes_of(exported.graph_module)
    norms = [node for node in nodes if op_name(node.target) == "batch_norm"]
    times = Counter(layer_of(norm) for norm in norms)
    return [norm for norm in norms if times[layer_of(norm)] == 1]


def _read_alone(exported: Any) -> list[tuple[Node, Node]]:
    """Batch norms that are called once, each with the only operation that reads its output."""
    return [(norm, next(iter(norm.users))) for norm in _norms(exported) if len(norm.users) == 1]


def _sums(exported: Any) -> list[str]:
    """Batch norms whose output only a sum reads, with another tensor of its shape."""
    found = []
    for norm, reader in _read_alone(exported):
        if op_name(reader.target) not in ("add", "add_") or not layer_of(norm):
            continue
        shapes = [one.meta["val"].shape for one in reader.all_input_nodes]
        is_plain = len(shapes) == len(reader.args) == 2 and shapes[0] == shapes[1]
        if is_plain and all(one.op != "output" for one in reader.users):
            found.append(layer_of(norm))
    return found


def _prologues(exported: Any) -> Chains:
    """(batch norm, activation, convolution), each the only reader of the one before."""
    nodes = nodes_of(exported.graph_module)
    convolutions = Counter(layer_of(node) for node in nodes if op_name(node.target) == "conv2d")
    found = []
    for norm, activation in _read_alone(exported):
        readers = list(activation.users)
        if (
            op_name(activation.target) in ACTIVATIONS
            and len(readers) == 1
            and op_name(readers[0].target) == "conv2d"
            and readers[0].args[0] is activation
            and convolutions[layer_of(readers[0])] == 1
        ):
            found.append((layer_of(norm), layer_of(activation), layer_of(readers[0])))
    return found
