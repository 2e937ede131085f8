"""How channels pass through elementwise operations, reductions and pooling."""

from __future__ import annotations

from types import SimpleNamespace as Arguments
from typing import Any

import torch

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.solver import TracedAxis
from anywidth.planning.trace.value import Traced


def elementwise(cursor: Cursor, a: Arguments) -> Traced:
    return cursor.output(cursor.broadcast(list(vars(a).values()), cursor.shape))


def fake_quantized(cursor: Cursor, a: Arguments) -> Any:
    """Rounded by a scale for the tensor or for each channel, which an observer may keep."""
    names = ("running_min", "running_max", "scale", "zero_point")
    kept = [v for v in (getattr(a, n, None) for n in names) if isinstance(v, Traced) and v.shape]
    dim = getattr(a, "ch_axis", None) if getattr(a, "per_row_fake_quant", True) else None
    dim = getattr(a, "axis", dim)
    for value in kept if dim is not None and dim >= 0 else ():
        if value.shape[0] == a.self.shape[dim]:
            cursor.unify(a.self.axes[dim], value.axes[0])
        else:
            why = f"observed by {cursor.place}, which has no size as yet: run the network once"
            cursor.solver.fix(a.self.axes[dim], why)
    return cursor.outputs(a.self.axes)


def nothing(cursor: Cursor, a: Arguments) -> None:
    """A check that gives no result, or a size that depends on values, which channels never do."""


def along_dims(cursor: Cursor, a: Arguments) -> Traced:
    """Moves entries along some dimensions, which therefore stay as they are."""
    for dim in a.dims or range(len(a.self.axes)):
        cursor.solver.fix(a.self.axes[dim], f"reordered by {cursor.place}")
    return cursor.output(a.self.axes)


def reduction(cursor: Cursor, a: Arguments) -> Any:
    if isinstance(getattr(a, "other", None), Traced):
        return elementwise(cursor, a)  # torch.max(a, b)
    rank = len(a.self.shape)
    dims = getattr(a, "dim", None)
    dims = list(range(rank)) if dims is None or dims == [] else dims
    dims = {d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])}
    kept = [None] if getattr(a, "keepdim", False) else []
    if cursor.leaves:
        # Of fewer classes, what is left says something else.
        cursor.closed(a.self, dims, "reduced to an output of the model")
    axes: list[TracedAxis] = []
    for dim, axis in enumerate(a.self.axes):
        axes += kept if dim in dims else [axis]
    return cursor.outputs(axes)


def spatial(cursor: Cursor, a: Arguments) -> Any:
    """Pooling, resizing: batch and channels pass, positions are new."""
    value: Traced = next(v for v in vars(a).values() if isinstance(v, Traced))
    rank = next((n for n in (1, 2, 3) if f"{n}d" in cursor.op), 1)
    return cursor.outputs(cursor.closed(value, range(-rank, 0), "pooled or resized"))


def unpool(cursor: Cursor, a: Arguments) -> Any:
    """What was pooled elsewhere says where each channel's entries go back."""
    cursor.broadcast([a.self, a.indices], a.self.shape)
    return spatial(cursor, a)


def grid_sample(cursor: Cursor, a: Arguments) -> Traced:
    for axis in a.grid.axes[1:]:
        cursor.solver.fix(axis, f"positions to read in {cursor.place}")
    # Heads that were merged with the examples read at places of their own.
    cursor.unify(a.input.axes[0], a.grid.axes[0])
    return cursor.output([*a.input.axes[:2], *[None] * (len(a.input.shape) - 2)])


def transform(cursor: Cursor, a: Arguments) -> Traced:
    """A Fourier transform: every entry along its dimensions depends on all others."""
    dims = range(len(a.self.shape)) if a.dim is None else a.dim
    dims = [dims] if isinstance(dims, int) else dims
    return cursor.output(cursor.closed(a.self, dims, "transformed"))


def difference(cursor: Cursor, a: Arguments) -> Traced:
    """Two tensors compared entry by entry: all of their differences, or the mean or sum."""
    shape = torch.broadcast_shapes(a.self.shape, a.target.shape)
    axes = cursor.broadcast([a.self, a.target], shape)
    return cursor.output(axes if cursor.shape else [])


def compare(cursor: Cursor, a: Arguments) -> Traced:
    """Two tensors compared along one dimension, which is gone then."""
    shape = tuple(map(max, zip(a.x1.shape, a.x2.shape, strict=True)))
    axes = cursor.broadcast([a.x1, a.x2], shape)
    dim = getattr(a, "dim", -1) % len(shape)
    kept = [None] if getattr(a, "keepdim", False) else []
    return cursor.output([*axes[:dim], *kept, *axes[dim + 1 :]])
