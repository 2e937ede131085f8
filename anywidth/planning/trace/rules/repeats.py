"""How channels pass through operations that repeat entries."""

from __future__ import annotations

import math
from types import SimpleNamespace as Arguments

from anywidth.planning.held_numbers import is_number_of_heads
from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.solver import TracedAxis, scaled
from anywidth.planning.trace.value import Traced, shape_of
from anywidth.planning.trace.views import MOST_PIECES


def broadcast(cursor: Cursor, a: Arguments) -> list[Traced]:
    return list(cursor.outputs(cursor.broadcast(a.tensors, shape_of(cursor.meta[0]))))


def repeat(cursor: Cursor, a: Arguments) -> Traced:
    """The whole of a tensor again and again along each dimension."""
    missing = len(cursor.shape) - len(a.self.shape)
    old, axes = (1,) * missing + a.self.shape, [None] * missing + [*a.self.axes]
    return cursor.output(
        [
            axis if size == new else _repeated(cursor, a.self, axis, size, new // size)
            for size, new, axis in zip(old, cursor.shape, axes, strict=True)
        ]
    )


def _repeated(cursor: Cursor, value: Traced, axis: TracedAxis, size: int, times: int) -> TracedAxis:
    if _is_per_channel(cursor, value, axis, times):
        cursor.guess()
        return scaled(cursor.found.fresh_axis(times), size)
    pieces = cursor.solver.pieces(_followed(cursor, axis))
    if len(pieces) * times > MOST_PIECES:
        cursor.solver.fix(axis, f"repeated {times} times by {cursor.place}")
        return None
    return pieces * times or None


def _is_per_channel(cursor: Cursor, value: Traced, axis: TracedAxis, times: int) -> bool:
    """Whether a constant may be repeated for each channel, as a filter is; a rehearsal tells."""
    found = cursor.found
    held = (v for name, v in found.tensors.items() if name not in found.buffers)
    is_constant = not cursor.is_batched and (axis is None or found.is_constant(value))
    is_open = cursor.misreading is None and not cursor.failures
    return is_constant and is_open and any(times in one.shape for one in held)


def _followed(cursor: Cursor, axis: TracedAxis) -> TracedAxis:
    """The axis if it is repeated as often at another width; a rehearsal tells."""
    if cursor.misreading is not None:
        cursor.solver.fix(axis, f"repeated more or less often at other widths by {cursor.place}")
        return None
    if axis is not None:
        cursor.guess()
    return axis


def repeat_interleave(cursor: Cursor, a: Arguments) -> Traced:
    """Each entry along one dimension as many times as it says, one after the other."""
    if not hasattr(a, "self") or not isinstance(a.repeats, int) or a.dim is None:
        return cursor.keep_whole(a, f"repeated by {cursor.place}")
    axes = list(a.self.axes)
    if axes[a.dim] is None:
        axes[a.dim] = _made_heads(cursor, a.self.shape[a.dim], a.repeats)
    else:
        axes[a.dim] = scaled(_followed(cursor, axes[a.dim]), a.repeats)
    return cursor.output(axes)


def _made_heads(cursor: Cursor, groups: int, times: int) -> TracedAxis:
    """The heads that entries are repeated for, the same number of each group, if heads narrow."""
    is_heads = any(map(is_number_of_heads, cursor.sized_by(groups * times)))
    if not is_heads or times == 1 or cursor.misreading is not None or cursor.failures:
        return None
    cursor.guess()
    return cursor.found.fresh_axis(times) * groups


def windows(cursor: Cursor, a: Arguments) -> Traced:
    """Windows along one dimension, their entries in a dimension of their own."""
    return cursor.output([*cursor.closed(a.self, [a.dimension], "cut into windows"), None])


def im2col(cursor: Cursor, a: Arguments) -> Traced:
    """Of each channel, the entries of a window become neighbours."""
    *batch, channels, _, _ = a.self.axes
    return cursor.output([*batch, scaled(channels, math.prod(a.kernel_size)), None])


def col2im(cursor: Cursor, a: Arguments) -> Traced:
    *batch, entries, _ = a.self.axes
    size = math.prod(a.kernel_size)
    if entries is not None:
        entries = cursor.in_units(entries, a.self.shape[-2] // size, size)
    return cursor.output([*batch, entries, None, None])
