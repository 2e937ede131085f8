"""Numbers that are a power of how many channels there are: 1/64, or the root of 64.

They were worked out for the full width, from an attribute of a module as a rule. At another width
they must follow, or what they scale is too large or too small. A rehearsal tells which do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.nodes import number_of, op_name
from anywidth.planning.trace.rules.table import PRODUCTS
from anywidth.planning.trace.solver import Pieces, TracedAxis
from anywidth.planning.trace.trace_findings import WidthConstant
from anywidth.planning.trace.value import Traced

ROOTS = (0.5, -0.5)
# Of channels that were summed over, their mean.
MEANS = (1.0, -1.0)
# Of fewer channels, powers are numbers that mean anything.
FEWEST = 8
# How far back a sum or product may lie.
MOST_STEPS = 6
# Passed on the way from a buffer to what it scales.
CASTS = ("to", "_to_copy", "type_as", "clone", "detach", "alias", "lift_fresh_copy", "contiguous")


def look_for_constant(cursor: Cursor, values: dict[Node, Any]) -> None:
    """Reports a number that the present operation multiplies or divides by, if it is one."""
    node = cursor.node
    assert node is not None
    number, tolerance, name = number_of(node), 1e-6, None
    if number is None and cursor.op in ("mul", "div"):
        number, tolerance, name = _held_number(cursor, node, values)
    if number is None or number <= 0:
        return
    own = cursor.solver.variables(_axes(node, values))
    for axis in _related(node, values):
        is_summed = own.isdisjoint(cursor.solver.variables([axis]))
        powers = ROOTS + MEANS if is_summed else ROOTS
        power = _power(number, cursor.solver.size(axis), powers, tolerance)
        if power is None or not _is_open(cursor, axis):
            continue
        if name is not None:
            cursor.found.scales[name] = (axis, power)
        else:
            constant = WidthConstant(node, cursor.place, number, axis, power)
            _report(cursor, constant, is_explained=_stays_anyway(cursor, constant, values))
        return


def _report(cursor: Cursor, constant: WidthConstant, is_explained: bool) -> None:
    """Has a number rehearsed; if it stayed before, together with an attribute that it may be of."""
    times = cursor.misreading.times if cursor.misreading else 0
    attributes = list(_attributes(cursor, constant))
    if times > len(attributes):
        if not is_explained:
            cursor.found.staying.append(constant)
        return
    cursor.found.constants.append(constant)
    if times > 0:
        path, name, whole, power = attributes[times - 1]
        cursor.bind(path, name, constant.axis, power=power, whole=whole)


def _stays_anyway(cursor: Cursor, constant: WidthConstant, values: dict[Node, Any]) -> bool:
    """Whether an axis that never narrows has the size too: the number may well be of that one."""
    read = [values.get(node) for node in (constant.node, *constant.node.all_input_nodes)]
    size = cursor.solver.size(constant.axis)
    return any(
        axis is None and length == size
        for value in read
        if isinstance(value, Traced)
        for length, axis in zip(value.shape, value.axes, strict=True)
    )


def _attributes(
    cursor: Cursor, constant: WidthConstant
) -> Iterator[tuple[str, str, float | None, float | None]]:
    """Attributes of the module around, and of those around it, that the number may be of.

    The number of channels itself first: (path, name, None, None); else the value and its power.
    """
    size = cursor.solver.size(constant.axis)
    steps = cursor.layer.split(".") if cursor.layer else []
    kept = [
        (path, name, value)
        for path in [".".join(steps[:count]) for count in range(len(steps), -1, -1)]
        for name, value in vars(cursor.found.known.model.get_submodule(path)).items()
        if type(value) in (int, float) and not name.startswith("_")
    ]
    yield from ((path, name, None, None) for path, name, v in kept if type(v) is int and v == size)
    for path, name, value in kept:
        if type(value) is float and value > 0:
            if math.isclose(value, constant.number, rel_tol=1e-6):
                yield path, name, value, constant.power
            elif math.isclose(value * constant.number, 1, rel_tol=1e-6):
                yield path, name, value, -constant.power


def _held_number(
    cursor: Cursor, node: Node, values: dict[Node, Any]
) -> tuple[float | None, float, str | None]:
    """The buffer of one number that an operation multiplies by: its value, tolerance and name."""
    for factor in node.all_input_nodes:
        while op_name(factor.target) in CASTS and factor.all_input_nodes:
            factor = factor.all_input_nodes[0]
        value = values.get(factor)
        if not isinstance(value, Traced) or not cursor.found.is_constant(value) or value.shape:
            continue
        assert value.source is not None
        path, _, key = value.source.rpartition(".")
        held = getattr(cursor.found.known.model.get_submodule(path), key)
        if held.is_floating_point() and not held.is_meta:
            is_short = held.dtype in (torch.float16, torch.bfloat16)
            return float(held), 1e-2 if is_short else 1e-6, value.source
    return None, 0, None


def _related(node: Node, values: dict[Node, Any]) -> Iterator[Pieces]:
    """Axes of what is scaled, and those that were summed over to come to it."""
    yield from _axes(node, values)
    for _ in range(MOST_STEPS):
        yield from (axis for read in node.all_input_nodes for axis in _axes(read, values))
        tensors = [n for n in node.all_input_nodes if isinstance(values.get(n), Traced)]
        wide = [n for n in tensors if values[n].shape]
        if op_name(node.target) in PRODUCTS or len(wide) != 1:
            return
        node = wide[0]


def _axes(node: Node, values: dict[Node, Any]) -> list[Pieces]:
    value = values.get(node)
    return [a for a in value.axes if a is not None] if isinstance(value, Traced) else []


def _power(number: float, size: int, powers: Sequence[float], tolerance: float) -> float | None:
    if size < FEWEST:
        return None
    return next((p for p in powers if math.isclose(number, size**p, rel_tol=tolerance)), None)


def _is_open(cursor: Cursor, axis: TracedAxis) -> bool:
    variables = cursor.solver.variables([axis])
    return any(cursor.solver.fixed(variable) is None for variable in variables)
