"""How channels pass through views, joins, cuts and shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace as Arguments

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.solver import TracedAxis, scaled
from anywidth.planning.trace.value import Traced, shape_of
from anywidth.planning.trace.views import reshape


def view(cursor: Cursor, a: Arguments) -> Traced:
    return reshape(cursor, a.self, cursor.shape)


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


def chunk(cursor: Cursor, a: Arguments) -> list[Traced]:
    """Any operation that returns consecutive parts along one dimension."""
    dim = a.dim % len(a.self.shape)
    sizes = [shape_of(meta)[dim] for meta in cursor.meta]
    axis = a.self.axes[dim]
    parts: Sequence[TracedAxis] = [None] * len(sizes)
    if axis is not None:
        found = None if cursor.misreading else cursor.parts(axis, sizes)
        if found is None:
            kind = "unequal parts" if len(set(sizes)) > 1 else "parts of constant size"
            cursor.solver.fix(axis, f"cut into {kind} {sizes} by {cursor.op}")
        else:
            cursor.guess()
            parts = found
    before, after = a.self.axes[:dim], a.self.axes[dim + 1 :]
    return [
        cursor.output([*before, part, *after], meta)
        for part, meta in zip(parts, cursor.meta, strict=True)
    ]


def without_dim(cursor: Cursor, a: Arguments) -> Traced | list[Traced]:
    """One entry along a dimension, or all of them one by one."""
    axes = cursor.closed(a.self, [a.dim], "taken apart")
    del axes[a.dim]
    return cursor.outputs(axes)


def slice_(cursor: Cursor, a: Arguments) -> Traced:
    full, kept = a.self.shape[a.dim], cursor.shape[a.dim]
    axes = list(a.self.axes)
    axis = axes[a.dim]
    if axis is not None and 0 < kept < full:
        axes[a.dim] = None
        start = (a.start or 0) % full
        is_row = getattr(a, "step", 1) == 1 and cursor.misreading is None
        if is_row and kept > 1 and full % kept == 0 and start % kept == 0:
            cursor.guess()
            axes[a.dim] = cursor.equal_parts(axis, full // kept)[start // kept]
        else:
            cursor.solver.fix(axis, f"sliced to {kept} of {full} by {cursor.place}")
    return cursor.output(axes)


def index(cursor: Cursor, a: Arguments) -> Traced:
    indexed = [i for i, tensor in enumerate(a.indices) if tensor is not None]
    cursor.fix(a.indices, "is used as an index")
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        cursor.fix(a.self, f"indexed by {cursor.place}")
        return cursor.output([None] * len(cursor.shape))
    rank = max(len(a.indices[i].shape) for i in indexed)
    axes = cursor.closed(a.self, indexed, "indexed")
    return cursor.output([*axes[: indexed[0]], *[None] * rank, *axes[indexed[-1] + 1 :]])


def index_select(cursor: Cursor, a: Arguments) -> Traced:
    cursor.fix(a.index, "is used as an index")
    return cursor.output(cursor.closed(a.self, [a.dim], "indexed"))


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
