"""How channels pass through recurrent layers and their cells: all gates narrow together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace as Arguments
from typing import Any

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.solver import TracedAxis
from anywidth.planning.trace.value import Traced

Weights = Sequence[Traced]


def sequence(cursor: Cursor, a: Arguments) -> Any:
    """A recurrent layer over a sequence: the state has one size in all layers and directions."""
    values = a.input if hasattr(a, "input") else a.data
    states = list(a.hx) if isinstance(a.hx, list | tuple) else [a.hx]
    directions = 2 if a.bidirectional else 1
    rows = len(a.params) // (a.num_layers * directions)
    cells = [a.params[i : i + rows] for i in range(0, len(a.params), rows)]
    # With a projection, its last weight, a cell gives less than its state.
    outer = cells[0][1].axes[1]
    hidden = cells[0][-1].axes[1] if _is_projected(cells[0]) else outer
    steps = math.prod(values.shape[:-1])
    read = values.axes[-1]
    for place in range(0, len(cells), directions):
        for cell in cells[place : place + directions]:
            _tie(cursor, cell, read, hidden, outer)
            _count(cursor, steps, cell)
        read = None if outer is None else outer * directions
    for state, axis in zip(states, [outer, hidden], strict=False):
        cursor.unify(state.axes[-1], axis)
    _make(cursor, cells[0], outer)
    output, *last = cursor.meta
    return [
        cursor.output([*values.axes[:-1], read], output),
        *(
            cursor.output([*state.axes[:-1], axis], meta)
            for state, axis, meta in zip(states, [outer, hidden], last, strict=False)
        ),
    ]


def cell(cursor: Cursor, a: Arguments) -> Any:
    """One step: of the state, or of an LSTM's two states."""
    states = list(a.hx) if isinstance(a.hx, list | tuple) else [a.hx]
    weights = [w for w in (a.w_ih, a.w_hh, a.b_ih, a.b_hh) if w is not None]
    hidden = a.w_hh.axes[1]
    _tie(cursor, weights, a.input.axes[-1], hidden, hidden)
    _count(cursor, math.prod(a.input.shape[:-1]), weights)
    for state in states:
        cursor.unify(state.axes[-1], hidden)
    _make(cursor, weights, hidden)
    return cursor.outputs([*a.input.axes[:-1], hidden])


def _is_projected(weights: Weights) -> bool:
    return len(weights) % 2 == 1


def _tie(
    cursor: Cursor, weights: Weights, read: TracedAxis, hidden: TracedAxis, outer: TracedAxis
) -> None:
    """Ties what a cell reads and its state to its weights, in all gates alike."""
    count = 4 if "lstm" in cursor.op else 3 if "gru" in cursor.op else 1
    gates = None if hidden is None else hidden * count
    incoming, recurrent = weights[:2]
    if read is None:
        reason = f"{cursor.layer or cursor.op} reads an axis of constant size"
        cursor.solver.fix(incoming.axes[1], reason)
    else:
        cursor.unify(read, incoming.axes[1])
    cursor.unify(outer, recurrent.axes[1])
    for weight in weights[:-1] if _is_projected(weights) else weights:
        cursor.unify(weight.axes[0], gates)
    if _is_projected(weights):
        cursor.unify(weights[-1].axes[0], outer)
        cursor.unify(weights[-1].axes[1], hidden)
    cursor.found.readers.append((cursor.layer, incoming.axes[1]))


def _count(cursor: Cursor, steps: int, weights: Weights) -> None:
    """Every weight meets every step once."""
    for weight in weights:
        if len(weight.shape) == 2:
            sizes = list(zip(weight.shape, weight.axes, strict=True))
            cursor.count(Traced((steps,), (None,)), sizes)


def _make(cursor: Cursor, weights: Weights, made: TracedAxis) -> None:
    cursor.make(cursor.layer, made, weights[0], can_fold=False)
    for weight in weights:
        cursor.learn(weight, weight.axes[0])
