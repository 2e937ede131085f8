"""How channels pass through views, joins and shuffles."""

from __future__ import annotations

from types import SimpleNamespace as Arguments

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.solver import TracedAxis, scaled
from anywidth.planning.trace.value import Traced
from anywidth.planning.trace.views import reshape


def view(cursor: Cursor, a: Arguments) -> Traced:
    sizes = getattr(a, "size", None) or getattr(a, "shape", None) or []
    rest = sizes.index(-1) if -1 in sizes else None
    return reshape(cursor, a.self, cursor.shape, rest)


def permute(cursor: Cursor, a: Arguments) -> Traced:
    return cursor.output([a.self.axes[dim] for dim in a.dims])


def transpose(cursor: Cursor, a: Arguments) -> Traced:
    """Two dimensions change places: those named, or the last two."""
    names = [n for n in ("dim0", "dim1", "axis0", "axis1") if hasattr(a, n)]
    first, second = (getattr(a, n) for n in names) if names else (-2, -1)
    axes = list(a.self.axes)
    axes[first], axes[second] = axes[second], axes[first]
    return cursor.output(axes)


def reverse_dims(cursor: Cursor, a: Arguments) -> Traced:
    return cursor.output(a.self.axes[::-1])


def movedim(cursor: Cursor, a: Arguments) -> Traced:
    rank = len(a.self.shape)
    sources, targets = (
        [dim % rank for dim in (dims if isinstance(dims, list | tuple) else [dims])]
        for dims in (a.source, a.destination)
    )
    placed = dict(zip(targets, sources, strict=True))
    rest = iter(dim for dim in range(rank) if dim not in sources)
    order = [placed[dim] if dim in placed else next(rest) for dim in range(rank)]
    return cursor.output([a.self.axes[dim] for dim in order])


def unsqueeze(cursor: Cursor, a: Arguments) -> Traced:
    axes = list(a.self.axes)
    axes.insert(a.dim % (len(axes) + 1), None)
    return cursor.output(axes)


def cat(cursor: Cursor, a: Arguments) -> Traced:
    shape = cursor.shape
    dim = getattr(a, "dim", 0) % len(shape)
    tensors = [t for t in a.tensors if 0 not in t.shape]
    others = [
        Traced((*t.shape[:dim], 1, *t.shape[dim + 1 :]), (*t.axes[:dim], None, *t.axes[dim + 1 :]))
        for t in tensors
    ]
    axes = cursor.broadcast(others, (*shape[:dim], 1, *shape[dim + 1 :]))
    if any(t.axes[dim] is not None for t in tensors):
        constant = f"joined as a constant part by {cursor.op}"
        joined = [t.axes[dim] or cursor.solver.new(t.shape[dim], constant) for t in tensors]
        axes[dim] = tuple(piece for axis in joined for piece in axis)
    return cursor.output(axes)


def stack(cursor: Cursor, a: Arguments) -> Traced:
    shape = cursor.shape
    dim = a.dim % len(shape)
    axes = cursor.broadcast(a.tensors, shape[:dim] + shape[dim + 1 :])
    return cursor.output([*axes[:dim], None, *axes[dim:]])


def as_complex(cursor: Cursor, a: Arguments) -> Traced:
    """The last dimension, of size 2, becomes the two parts of a number."""
    return cursor.output(cursor.closed(a.self, [-1], "made two parts of a number")[:-1])


def as_real(cursor: Cursor, a: Arguments) -> Traced:
    return cursor.output([*a.self.axes, None])


def pad(cursor: Cursor, a: Arguments) -> Traced:
    dims = [-1 - i for i in range(len(a.pad) // 2) if a.pad[2 * i] or a.pad[2 * i + 1]]
    return cursor.output(cursor.closed(a.self, dims, "padded"))


def pixel_shuffle(cursor: Cursor, a: Arguments) -> Traced:
    """A channel of the result is a unit of `upscale_factor` squared neighbouring channels."""
    *batch, channels, _, _ = a.self.axes
    size = a.upscale_factor**2
    if channels is not None:
        channels = cursor.in_units(channels, a.self.shape[-3] // size, size)
    return cursor.output([*batch, channels, None, None])


def pixel_unshuffle(cursor: Cursor, a: Arguments) -> Traced:
    *batch, channels, _, _ = a.self.axes
    return cursor.output([*batch, scaled(channels, a.downscale_factor**2), None, None])


def channel_shuffle(cursor: Cursor, a: Arguments) -> Traced:
    batch, channels, *positions = a.self.axes
    part = None if channels is None else cursor.equal_parts(channels, a.groups)[0]
    return cursor.output([batch, scaled(part, a.groups), *positions])


def glu(cursor: Cursor, a: Arguments) -> Traced:
    axes: list[TracedAxis] = list(a.self.axes)
    axis = axes[a.dim]
    axes[a.dim] = None if axis is None else cursor.equal_parts(axis, 2)[0]
    return cursor.output(axes)
