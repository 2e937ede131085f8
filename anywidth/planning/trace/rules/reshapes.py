"""How channels pass through views, joins, cuts and shuffles."""

from __future__ import annotations

from types import SimpleNamespace as Arguments

from anywidth.planning.trace.solver import TracedAxis
from anywidth.planning.trace.value import Context, Traced, shape_of
from anywidth.planning.trace.views import reshape


def view(context: Context, a: Arguments) -> Traced:
    return reshape(context, a.self, shape_of(context.meta))


def permute(context: Context, a: Arguments) -> Traced:
    dims = [d % len(a.self.shape) for d in a.dims]
    return context.output([a.self.axes[d] for d in dims])


def transpose(context: Context, a: Arguments) -> Traced:
    rank = len(a.self.shape)
    names = [n for n in ("dim0", "dim1", "axis0", "axis1") if hasattr(a, n)]
    first, second = (getattr(a, n) % rank for n in names) if names else (0, rank - 1)
    axes = list(a.self.axes)
    axes[first], axes[second] = axes[second], axes[first]
    return context.output(axes)


def movedim(context: Context, a: Arguments) -> Traced:
    rank = len(a.self.shape)
    sources, targets = (
        [dim % rank for dim in (dims if isinstance(dims, list | tuple) else [dims])]
        for dims in (a.source, a.destination)
    )
    placed = dict(zip(targets, sources, strict=True))
    rest = iter(dim for dim in range(rank) if dim not in sources)
    order = [placed[dim] if dim in placed else next(rest) for dim in range(rank)]
    return context.output([a.self.axes[dim] for dim in order])


def matrix_transpose(context: Context, a: Arguments) -> Traced:
    *others, rows, columns = a.self.axes
    return context.output([*others, columns, rows])


def unsqueeze(context: Context, a: Arguments) -> Traced:
    axes = list(a.self.axes)
    axes.insert(a.dim % (len(axes) + 1), None)
    return context.output(axes)


def cat(context: Context, a: Arguments) -> Traced:
    shape = shape_of(context.meta)
    dim = getattr(a, "dim", 0) % len(shape)
    tensors = [t for t in a.tensors if 0 not in t.shape]
    others = [
        Traced((*t.shape[:dim], 1, *t.shape[dim + 1 :]), (*t.axes[:dim], None, *t.axes[dim + 1 :]))
        for t in tensors
    ]
    axes = context.broadcast(others, (*shape[:dim], 1, *shape[dim + 1 :]))
    if any(t.axes[dim] is not None for t in tensors):
        joined: list[tuple[int, int]] = []
        for t in tensors:
            piece = context.live(t.axes[dim])
            constant = f"joined as a constant part by {context.op}"
            joined += piece or context.solver.new(t.shape[dim], fixed=constant)
        axes[dim] = tuple(joined)
    return context.output(axes)


def stack(context: Context, a: Arguments) -> Traced:
    shape = shape_of(context.meta)
    dim = a.dim % len(shape)
    axes = context.broadcast(a.tensors, shape[:dim] + shape[dim + 1 :])
    return context.output([*axes[:dim], None, *axes[dim:]])


def chunk(context: Context, a: Arguments) -> list[Traced]:
    """Any operation that returns consecutive parts along one dimension."""
    metas = list(context.meta)
    dim = a.dim % len(a.self.shape)
    sizes = [shape_of(m)[dim] for m in metas]
    axis = a.self.axes[dim]
    parts: list[TracedAxis] = [None] * len(metas)
    if axis is not None:
        found = None if context.misreading() else context.parts(axis, sizes)
        if found is None:
            kind = "unequal parts" if len(set(sizes)) > 1 else "parts of constant size"
            context.solver.fix(axis, f"cut into {kind} {sizes} by {context.op}")
        else:
            context.guess()
            parts = found
    results = []
    for meta, part in zip(metas, parts, strict=True):
        axes = [context.live(x) for x in a.self.axes]
        axes[dim] = part
        shape = shape_of(meta)
        results.append(
            Traced(shape, tuple(x if n > 1 else None for x, n in zip(axes, shape, strict=True)))
        )
    return results


def unbind(context: Context, a: Arguments) -> list[Traced]:
    dim = a.dim % len(a.self.shape)
    context.solver.fix(a.self.axes[dim], f"taken apart by {context.op}")
    axes = [context.live(x) for i, x in enumerate(a.self.axes) if i != dim]
    return [Traced(shape_of(meta), tuple(axes)) for meta in context.meta]


def select(context: Context, a: Arguments) -> Traced:
    dim = a.dim % len(a.self.shape)
    context.solver.fix(a.self.axes[dim], f"indexed by {context.place}")
    return context.output([context.live(x) for i, x in enumerate(a.self.axes) if i != dim])


def slice_(context: Context, a: Arguments) -> Traced:
    dim = a.dim % len(a.self.shape)
    full, kept = a.self.shape[dim], shape_of(context.meta)[dim]
    axes = [context.live(axis) for axis in a.self.axes]
    axis = axes[dim]
    if axis is not None and 0 < kept < full:
        axes[dim] = None
        start = (a.start or 0) % full
        is_row = getattr(a, "step", 1) == 1 and context.misreading() is None
        if is_row and kept > 1 and full % kept == 0 and start % kept == 0:
            context.guess()
            axes[dim] = context.equal_parts(axis, full // kept)[start // kept]
        else:
            context.solver.fix(axis, f"sliced to {kept} of {full} by {context.place}")
    return context.output(axes)


def index(context: Context, a: Arguments) -> Traced:
    indexed = [i for i, tensor in enumerate(a.indices) if tensor is not None]
    context.fix_all(a.indices, "is used as an index")
    for i in indexed:
        context.solver.fix(a.self.axes[i], f"indexed by {context.place}")
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        context.fix_all([a.self], f"indexed by {context.place}")
        return context.output([None] * len(shape_of(context.meta)))
    rank = max(len(a.indices[i].shape) for i in indexed)
    axes = [context.live(axis) for axis in a.self.axes]
    return context.output([*axes[: indexed[0]], *[None] * rank, *axes[indexed[-1] + 1 :]])


def index_select(context: Context, a: Arguments) -> Traced:
    axes = [context.live(axis) for axis in a.self.axes]
    context.fix_all([a.index], "is used as an index")
    context.solver.fix(axes[a.dim], f"indexed by {context.place}")
    axes[a.dim] = None
    return context.output(axes)


def as_complex(context: Context, a: Arguments) -> Traced:
    """The last dimension, of size 2, becomes the two parts of a number."""
    context.solver.fix(a.self.axes[-1], f"two parts of a number in {context.place}")
    return context.output([context.live(axis) for axis in a.self.axes[:-1]])


def as_real(context: Context, a: Arguments) -> Traced:
    return context.output([*map(context.live, a.self.axes), None])


def pad(context: Context, a: Arguments) -> Traced:
    axes = [context.live(axis) for axis in a.self.axes]
    for i in range(len(a.pad) // 2):
        if a.pad[2 * i] or a.pad[2 * i + 1]:
            context.solver.fix(axes[-1 - i], f"padded by {context.place}")
            axes[-1 - i] = None
    return context.output(axes)


def pixel_shuffle(context: Context, a: Arguments) -> Traced:
    """A channel of the result is a unit of `upscale_factor` squared neighbouring channels."""
    axes = list(map(context.live, a.self.axes))
    if axes[-3] is not None:
        made = context.solver.new(a.self.shape[-3] // a.upscale_factor**2)
        context.unify(axes[-3], tuple((v, m * a.upscale_factor**2) for v, m in made))
        axes[-3] = context.live(made)
    return context.output([*axes[:-2], None, None])


def pixel_unshuffle(context: Context, a: Arguments) -> Traced:
    r = a.downscale_factor
    channels = a.self.axes[-3]
    live = context.live(channels)
    made = None if live is None else tuple((variable, m * r * r) for variable, m in live)
    return context.output([*map(context.live, a.self.axes[:-3]), made, None, None])


def channel_shuffle(context: Context, a: Arguments) -> Traced:
    axis = context.live(a.self.axes[1])
    if axis is not None:
        parts = context.equal_parts(axis, a.groups)
        axis = context.live(parts[0])
    made = None if axis is None else tuple((variable, m * a.groups) for variable, m in axis)
    return context.output([a.self.axes[0], made, *a.self.axes[2:]])


def glu(context: Context, a: Arguments) -> Traced:
    dim = a.dim % len(a.self.shape)
    axes = [context.live(axis) for axis in a.self.axes]
    axis = axes[dim]
    if axis is not None:
        axes[dim] = context.equal_parts(axis, 2)[0]
    return context.output([context.live(axis) for axis in axes])
