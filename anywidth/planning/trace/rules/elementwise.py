"""How channels pass through elementwise operations, reductions and pooling."""

from __future__ import annotations

from types import SimpleNamespace as Arguments
from typing import Any

from anywidth.planning.trace.solver import TracedAxis
from anywidth.planning.trace.value import Context, Traced, shape_of


def elementwise(context: Context, a: Arguments) -> Traced:
    values = [v for v in vars(a).values() if isinstance(v, Traced)]
    return context.output(context.broadcast(values, shape_of(context.meta)))


def constant(context: Context, a: Arguments) -> Any:
    """A new tensor whose size was worked out in Python."""
    return context.outputs([None] * len(shape_of(context.meta)))


def nothing(context: Context, a: Arguments) -> None:
    """A check that gives no result."""


def along_dims(context: Context, a: Arguments) -> Traced:
    """Moves entries along some dimensions, which therefore stay as they are."""
    for dim in a.dims or range(len(a.self.axes)):
        context.solver.fix(a.self.axes[dim], f"reordered by {context.place}")
    return context.output([context.live(axis) for axis in a.self.axes])


def reduction(context: Context, a: Arguments) -> Any:
    if isinstance(getattr(a, "other", None), Traced):
        return elementwise(context, a)  # torch.max(a, b)
    rank = len(a.self.shape)
    dims = getattr(a, "dim", None)
    dims = list(range(rank)) if dims is None or dims == [] else dims
    dims = {d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])}
    axes = [context.live(axis) for axis in a.self.axes]
    if getattr(a, "keepdim", False):
        return context.outputs([None if i in dims else axis for i, axis in enumerate(axes)])
    return context.outputs([axis for i, axis in enumerate(axes) if i not in dims])


def spatial(context: Context, a: Arguments) -> Any:
    """Pooling, resizing: batch and channels pass, positions are new."""
    value: Traced = next(v for v in vars(a).values() if isinstance(v, Traced))
    axes: list[TracedAxis] = []
    for i, axis in enumerate(value.axes):
        if i < len(value.shape) - spatial_rank(context.op):
            axes.append(context.live(axis))
        else:
            context.solver.fix(axis, f"pooled or resized over in {context.op}")
            axes.append(None)
    return context.outputs(axes)


def unpool(context: Context, a: Arguments) -> Any:
    """What was pooled elsewhere says where each channel's entries go back."""
    context.broadcast([a.self, a.indices], a.self.shape)
    return spatial(context, a)


def grid_sample(context: Context, a: Arguments) -> Traced:
    context.fix_all([a.grid], f"positions to read in {context.place}")
    positions = [None] * (len(a.input.shape) - 2)
    return context.output([*map(context.live, a.input.axes[:2]), *positions])


def transform(context: Context, a: Arguments) -> Traced:
    """A Fourier transform: every entry along its dimensions depends on all others."""
    dims = range(len(a.self.shape)) if a.dim is None else a.dim
    axes = [context.live(axis) for axis in a.self.axes]
    for dim in [dims] if isinstance(dims, int) else dims:
        context.solver.fix(axes[dim], f"transformed by {context.place}")
        axes[dim] = None
    return context.output(axes)


def compare(context: Context, a: Arguments) -> Traced:
    """Two tensors compared along one dimension, which is gone then."""
    shape = tuple(map(max, zip(a.x1.shape, a.x2.shape, strict=True)))
    axes = context.broadcast([a.x1, a.x2], shape)
    dim = getattr(a, "dim", -1) % len(shape)
    kept = [None] if getattr(a, "keepdim", False) else []
    return context.output([*axes[:dim], *kept, *axes[dim + 1 :]])


def spatial_rank(op: str) -> int:
    return next((n for n in (1, 2, 3) if f"{n}d" in op), 1)
