"""Graphs of widths between two converted ones, made by changing the numbers that differ.

A conversion takes seconds, but two widths of a network differ in little: weights, and numbers that
are sizes of axes, such as the groups of a depthwise convolution. If anything else differs, the
width must be converted too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn

from anywidth.planning.groups import Plan
from anywidth.width import ChannelConfig

# (size at the narrow end, size at the wide end) → sizes that such axes have in between.
Sizes = Mapping[tuple[int, int], set[int]]


class DifferentGraphsError(Exception):
    """Two graphs differ in more than sizes of axes."""


def sizes_between(
    plan: Plan, narrow: ChannelConfig, wide: ChannelConfig, config: ChannelConfig
) -> Sizes:
    """For each axis that narrows, its sizes at two configurations and at one between them."""
    axes = {axis for tensor in plan.tensors.values() for axis in tensor if axis}
    axes |= {slot.axis for slot in plan.attributes}
    found: dict[tuple[int, int], set[int]] = {}
    for axis in axes:
        low, high, here = (plan.axis_size(axis, c) for c in (narrow, wide, config))
        found.setdefault((low, high), set()).add(here)
    return found


def graph_between(narrow: Any, wide: Any, sizes: Sizes, network: nn.Module) -> Any:
    """A graph of a width between two others; raises `DifferentGraphsError` if there is none.

    Args:
        narrow: the graph of a narrower width, an `onnx.ModelProto` with its weights.
        wide: the graph of a wider width.
        sizes: from `sizes_between`.
        network: the plain network of the width, whose weights go into the graph.
    """
    import onnx

    found = onnx.ModelProto()
    found.CopyFrom(narrow)
    del found.graph.value_info[:]  # sizes of intermediate results, which onnxruntime computes
    weights = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    for tensor, other in _pairs(found.graph.initializer, wide.graph.initializer):
        _set_values(tensor, other, sizes, weights)
    shapes = [
        {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
        for proto in (narrow, wide, found)
    ]
    for node, other in _pairs(found.graph.node, wide.graph.node):
        _set_attributes(node, other, {**sizes, **_own_sizes(node, shapes)})
    for one, other in _pairs(found.graph.output, wide.graph.output):
        dims = _pairs(one.type.tensor_type.shape.dim, other.type.tensor_type.shape.dim)
        for axis, other_axis in dims:
            if axis.HasField("dim_value"):
                axis.dim_value = _size(axis.dim_value, other_axis.dim_value, sizes)
    return found


def _set_values(tensor: Any, other: Any, sizes: Sizes, weights: Mapping[str, np.ndarray]) -> None:
    """Set weights to the network's own; other numbers must be sizes, or equal at both ends."""
    from onnx import numpy_helper

    low, high = numpy_helper.to_array(tensor), numpy_helper.to_array(other)
    if tensor.name != other.name or low.dtype != high.dtype or low.ndim != high.ndim:
        raise DifferentGraphsError
    if tensor.name in weights:
        value = weights[tensor.name]
    elif low.shape != high.shape:
        raise DifferentGraphsError
    elif np.array_equal(low, high):
        return
    elif low.dtype == np.int64:
        flat = [_size(int(a), int(b), sizes) for a, b in zip(low.flat, high.flat, strict=True)]
        value = np.array(flat, np.int64).reshape(low.shape)
    else:
        raise DifferentGraphsError
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value), tensor.name))


def _own_sizes(
    node: Any, shapes: list[dict[str, tuple[int, ...]]]
) -> dict[tuple[int, int], set[int]]:
    """The channels that a convolution makes, which are also the groups of a depthwise one.

    If two axes have the same sizes at both ends, sizes alone cannot tell which one is meant.
    """
    if node.op_type != "Conv" or any(node.input[1] not in one for one in shapes):
        return {}
    low, high, here = (one[node.input[1]][0] for one in shapes)
    return {(low, high): {here}}


def _set_attributes(node: Any, other: Any, sizes: Sizes) -> None:
    names = [(one.op_type, one.domain, list(one.input), list(one.output)) for one in (node, other)]
    if names[0] != names[1]:
        raise DifferentGraphsError
    for attribute, wide in _pairs(node.attribute, other.attribute):
        if attribute.name != wide.name or attribute.type != wide.type:
            raise DifferentGraphsError
        if attribute.type == attribute.INT:
            attribute.i = _size(attribute.i, wide.i, sizes)
        elif attribute.type == attribute.INTS:
            pairs = _pairs(attribute.ints, wide.ints)
            attribute.ints[:] = [_size(low, high, sizes) for low, high in pairs]
        elif attribute != wide:
            raise DifferentGraphsError


def _size(low: int, high: int, sizes: Sizes) -> int:
    found = sizes.get((low, high), {low} if low == high else set())
    if len(found) != 1:
        raise DifferentGraphsError
    return next(iter(found))


def _pairs(ones: Any, others: Any) -> Iterator[tuple[Any, Any]]:
    if len(ones) != len(others):
        raise DifferentGraphsError
    return zip(ones, others, strict=True)
