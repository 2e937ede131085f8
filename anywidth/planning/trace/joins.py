"""Which operations alone read what a batch norm gives."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.fx import Node

from anywidth.planning.trace.exported_graphs import export_in_mode
from anywidth.planning.trace.nodes import layer_of, nodes_of, op_name

ACTIVATIONS = ("relu", "relu6", "hardtanh", "silu", "hardswish")


def joined_in_training(
    model: nn.Module, inputs: tuple[Any, ...]
) -> tuple[list[tuple[str, str]], list[tuple[str, str, str]]]:
    """(batch norm, what alone reads it) in training, where more may come between or read along.

    Second, those with the convolution that alone reads what the reader gives.
    """
    try:
        exported = export_in_mode(model, inputs, training=True)
    except Exception:
        return [], []  # nothing is known, so nothing is joined
    pairs = [(layer_of(norm), layer_of(reader)) for norm, reader in _read_alone(exported)]
    return pairs, prologues(exported)


def _read_alone(exported: Any) -> list[tuple[Node, Node]]:
    """Batch norms that are called once, each with the one operation that reads its output."""
    nodes = nodes_of(exported.graph_module)
    norms = [node for node in nodes if op_name(node.target) == "batch_norm"]
    times = Counter(layer_of(norm) for norm in norms)
    return [
        (norm, next(iter(norm.users)))
        for norm in norms
        if times[layer_of(norm)] == len(norm.users) == 1
    ]


def prologues(exported: Any) -> list[tuple[str, str, str]]:
    """(batch norm, activation, convolution), each alone in reading what the one before gives."""
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
