"""How channels pass through operations that repeat entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace as Arguments

from anywidth.planning.trace.solver import TracedAxis
from anywidth.planning.trace.value import Context, Traced, shape_of
from anywidth.planning.trace.views import MOST_PIECES


def expand(context: Context, a: Arguments) -> Traced:
    shape = shape_of(context.meta)
    if isinstance(getattr(a, "other", None), Traced):
        return context.output(context.broadcast([a.self, a.other], shape))
    axes = context.broadcast([a.self], shape)
    if context.misreading() is None:
        old = (1,) * (len(shape) - len(a.self.shape)) + a.self.shape
        for i, size in enumerate(shape):
            if old[i] == 1 < size:
                axes[i] = _known_size(context, size, axes)
    return context.output(axes)


def _known_size(context: Context, size: int, others: Sequence[TracedAxis]) -> TracedAxis:
    """The axis that an attribute of the module around follows, if it has this size.

    Not one that the tensor has already: what is repeated then is something else.
    """
    expand = context.solver.expand
    taken = {variable for axis in others for variable, _ in expand(axis or ())}
    for path, _, axis, _ in context.attributes:
        pieces = expand(axis)
        is_other = taken.isdisjoint(variable for variable, _ in pieces)
        if path == context.layer and is_other and context.solver.size(pieces) == size:
            context.guess()
            return pieces
    return None


def broadcast(context: Context, a: Arguments) -> list[Traced]:
    axes = context.broadcast(a.tensors, shape_of(context.meta[0]))
    return list(context.outputs(axes))


def repeat(context: Context, a: Arguments) -> Traced:
    """The whole of a tensor again and again along each dimension."""
    shape = shape_of(context.meta)
    missing = len(shape) - len(a.self.shape)
    old, axes = (1,) * missing + a.self.shape, [None] * missing + [*a.self.axes]
    return context.output(
        [
            axis if size == new else _repeated(context, axis, new // size)
            for size, new, axis in zip(old, shape, axes, strict=True)
        ]
    )


def _repeated(context: Context, axis: TracedAxis, times: int) -> TracedAxis:
    live = _followed(context, axis)
    if live is not None and len(live) * times > MOST_PIECES:
        context.solver.fix(live, f"repeated {times} times by {context.place}")
        return None
    return None if live is None else live * times


def _followed(context: Context, axis: TracedAxis) -> TracedAxis:
    """The axis if it is repeated as often at another width; a rehearsal tells."""
    if context.misreading() is not None:
        context.solver.fix(axis, f"repeated more or less often at other widths by {context.place}")
        return None
    if axis is not None:
        context.guess()
    return context.live(axis)


def repeat_interleave(context: Context, a: Arguments) -> Traced:
    """Each entry along one dimension as many times as it says, one after the other."""
    if not hasattr(a, "self") or not isinstance(a.repeats, int) or a.dim is None:
        context.fix_all(list(vars(a).values()), f"repeated by {context.place}")
        return context.output([None] * len(shape_of(context.meta)))
    axes = [context.live(axis) for axis in a.self.axes]
    axes[a.dim] = _times(_followed(context, axes[a.dim]), a.repeats)
    return context.output(axes)


def windows(context: Context, a: Arguments) -> Traced:
    """Windows along one dimension, their entries in a dimension of their own."""
    axes = [context.live(axis) for axis in a.self.axes]
    context.solver.fix(axes[a.dimension], f"cut into windows by {context.place}")
    axes[a.dimension] = None
    return context.output([*axes, None])


def im2col(context: Context, a: Arguments) -> Traced:
    """Of each channel, the entries of a window become neighbours."""
    *batch, channels, _, _ = map(context.live, a.self.axes)
    return context.output([*batch, _times(channels, math.prod(a.kernel_size)), None])


def col2im(context: Context, a: Arguments) -> Traced:
    *batch, entries, _ = map(context.live, a.self.axes)
    if entries is not None:
        size = math.prod(a.kernel_size)
        made = context.solver.new(a.self.shape[-2] // size)
        context.unify(entries, _times(made, size))
        entries = context.live(made)
    return context.output([*batch, entries, None, None])


def _times(axis: TracedAxis, times: int) -> TracedAxis:
    return None if axis is None else tuple((variable, m * times) for variable, m in axis)
