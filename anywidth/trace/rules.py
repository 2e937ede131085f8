"""How channels pass through each operation: one rule a kind, one row an operation.

A rule takes the trace's context and the operation's arguments by their ATen names, says which
axes shrink together, and returns the result's axes. An operation with no row fixes whatever
channels it touches: nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace as Arguments
from typing import Any

from anywidth.trace.solver import TracedAxis
from anywidth.trace.value import Context, Traced, shape_of
from anywidth.trace.views import reshape

Rule = Callable[[Context, Arguments], Any]


# ---- layers with weights ---------------------------------------------------------------------


def convolution(context: Context, a: Arguments) -> Traced:
    return _convolve(context, a, transposed=False)


def transposed_convolution(context: Context, a: Arguments) -> Traced:
    return _convolve(context, a, transposed=True)


def _convolve(context: Context, a: Arguments, transposed: bool) -> Traced:
    solver, weight = context.solver, a.weight
    for axis in weight.axes[2:]:
        solver.fix(axis, "size of a convolution kernel")
    channel_axis = len(a.input.shape) - (len(weight.shape) - 1)
    read = a.input.axes[channel_axis]
    in_axis, out_axis = (0, 1) if transposed else (1, 0)
    made = weight.axes[out_axis]
    if a.groups == 1:
        _read(context, read, weight, in_axis)
        if weight.scale_name is not None:
            context.inputs[weight.scale_name] = in_axis
    else:
        # A convolution group is one unit of its inputs and of its outputs: whole groups go.
        groups = solver.new(a.groups)
        in_channels = a.input.shape[channel_axis]
        out_channels = shape_of(context.meta)[channel_axis]
        inputs = _times(groups, in_channels // a.groups)
        outputs = _times(groups, out_channels // a.groups)
        context.unify(read, inputs)
        context.unify(weight.axes[0], inputs if transposed else outputs)
        solver.fix(weight.axes[1], "channels within one convolution group")
        made = solver.expand(outputs)
    if a.bias is not None:
        context.unify(made, a.bias.axes[0])
    made = context.live(made)
    result = list(a.input.axes)
    for i in range(channel_axis + 1, len(result)):
        solver.fix(result[i], f"convolved over in {context.layer}")
        result[i] = None
    result[channel_axis] = made
    value = context.output(result)
    kernel = math.prod(weight.shape[2:])
    if transposed:
        # Each input meets the whole kernel, so the cost is counted over the input.
        context.cost(
            Traced(a.input.shape, (*a.input.axes[:channel_axis], context.live(read), *result[2:])),
            made if a.groups == 1 else None,
            weight.shape[1],
        )
        layer, factor, axes = context.costs.pop()
        context.costs.append((layer, factor * kernel, axes))
    else:
        inner = context.live(weight.axes[1]) if a.groups == 1 else None
        context.cost(value, inner, weight.shape[1])
        layer, factor, axes = context.costs.pop()
        context.costs.append((layer, factor * kernel, axes))
    context.makers.append((_owner(context, weight), made))
    return value


def linear(context: Context, a: Arguments) -> Traced:
    made = a.weight.axes[0] if len(a.weight.shape) == 2 else None
    inner = a.weight.axes[-1]
    _read(context, a.input.axes[-1], a.weight, len(a.weight.shape) - 1)
    if a.weight.scale_name is not None:
        context.inputs[a.weight.scale_name] = 1
    if a.bias is not None:
        context.unify(made, a.bias.axes[0])
    value = context.output([*a.input.axes[:-1], *([made] if len(a.weight.shape) == 2 else [])])
    value = Traced(value.shape, tuple(context.live(axis) for axis in value.axes))
    context.cost(value, context.live(inner), a.input.shape[-1])
    context.makers.append((_owner(context, a.weight), context.live(made)))
    return value


def _owner(context: Context, weight: Traced) -> str:
    """The layer that holds a weight, which may be another than the one that applies it."""
    if weight.scale_name is None:
        return context.layer
    return _layer_of(weight.scale_name) or context.layer


def _layer_of(parameter: str) -> str:
    path, parametrized, _ = parameter.partition("parametrizations.")
    return path.rstrip(".") if parametrized else parameter.rpartition(".")[0]


def _read(context: Context, read: TracedAxis, weight: Traced, in_axis: int) -> None:
    layer, inner = _owner(context, weight), weight.axes[in_axis]
    context.readers.append((layer, inner))
    if read is None and inner is not None:
        context.solver.fix(inner, f"{layer or context.op} reads an axis of constant size")
    else:
        context.unify(read, inner)


def batch_norm(context: Context, a: Arguments) -> Traced:
    channels = a.input.axes[1]
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensor = getattr(a, name)
        if tensor is not None:
            context.unify(channels, tensor.axes[0])
    return context.output([context.live(axis) for axis in a.input.axes])


def layer_norm(context: Context, a: Arguments) -> Traced:
    count = len(a.normalized_shape)
    for tensor in (a.weight, getattr(a, "bias", None)):
        if tensor is not None:
            for i in range(count):
                context.unify(a.input.axes[i - count], tensor.axes[i])
    return context.output([context.live(axis) for axis in a.input.axes])


def group_norm(context: Context, a: Arguments) -> Traced:
    channels = a.input.axes[1]
    if a.num_groups > 1:
        groups = context.solver.new(a.num_groups)
        context.unify(channels, _times(groups, a.input.shape[1] // a.num_groups))
    for tensor in (a.weight, a.bias):
        if tensor is not None:
            context.unify(channels, tensor.axes[0])
    return context.output([context.live(axis) for axis in a.input.axes])


def prelu(context: Context, a: Arguments) -> Traced:
    if len(a.self.shape) > 1 and a.weight.shape[0] > 1:
        context.unify(a.self.axes[1], a.weight.axes[0])
    return context.output([context.live(axis) for axis in a.self.axes])


def embedding(context: Context, a: Arguments) -> Traced:
    context.solver.fix(a.weight.axes[0], "entries of an embedding")
    context.fix_all([a.indices], "is used as an index")
    return context.output([*a.indices.axes, context.live(a.weight.axes[1])])


def weight_norm(context: Context, a: Arguments) -> Traced:
    for size, g, v in zip(a.g.shape, a.g.axes, a.v.axes, strict=True):
        if size > 1:
            context.unify(g, v)
    axes = tuple(context.live(axis) for axis in a.v.axes)
    return Traced(a.v.shape, axes, scale_name=a.g.scale_name)


# ---- products --------------------------------------------------------------------------------


def matmul(context: Context, a: Arguments) -> Traced:
    first = getattr(a, "self", None)
    second = getattr(a, "other", None) or getattr(a, "mat2", None)
    assert isinstance(first, Traced)
    assert isinstance(second, Traced)
    inner = second.axes[-2] if len(second.shape) > 1 else second.axes[0]
    context.unify(first.axes[-1], inner)
    left = first.axes[-2:-1]
    right = second.axes[-1:] if len(second.shape) > 1 else ()
    shape = shape_of(context.meta)
    batch_shape = shape[: len(shape) - len(left) - len(right)]
    batch = context.broadcast(
        [Traced(v.shape[:-2], v.axes[:-2]) for v in (first, second) if len(v.shape) > 2],
        batch_shape,
    )
    value = context.output([*batch, *map(context.live, left), *map(context.live, right)])
    context.cost(value, context.live(first.axes[-1]), first.shape[-1])
    return value


def addmm(context: Context, a: Arguments) -> Traced:
    value = matmul(context, Arguments(self=a.mat1, other=a.mat2))
    context.broadcast([value, a.self], value.shape)
    return Traced(value.shape, tuple(context.live(axis) for axis in value.axes))


def einsum(context: Context, a: Arguments) -> Traced:
    left, _, right = a.equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not right or "." in a.equation:
        context.fix_all(a.tensors, f"no rule for einsum {a.equation!r}")
        return context.output([None] * len(shape_of(context.meta)))
    axes: dict[str, TracedAxis] = {}
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, a.tensors, strict=True):
        for letter, size, axis in zip(term, tensor.shape, tensor.axes, strict=True):
            if size > 1 or letter not in axes:
                axes[letter] = (
                    context.unify(axes[letter], axis) if sizes.get(letter, 1) > 1 else axis
                )
                sizes[letter] = size
    axes = {letter: context.live(axis) for letter, axis in axes.items()}
    value = context.output([axes[letter] for letter in right])
    if len(terms) > 1:
        summed = [letter for letter in sizes if letter not in right]
        inner = axes[summed[0]] if len(summed) == 1 else None
        context.cost(value, inner, math.prod(sizes[letter] for letter in summed))
    return value


def attention(context: Context, a: Arguments) -> Traced:
    """softmax(q k^T) v: q, k share their features, k and v their positions, all their heads."""
    q, k, v = a.query, a.key, a.value
    context.unify(q.axes[-1], k.axes[-1])
    context.unify(k.axes[-2], v.axes[-2])
    batch = context.broadcast(
        [Traced(t.shape[:-2], t.axes[:-2]) for t in (q, k, v)], shape_of(context.meta)[:-2]
    )
    scores = Traced((*q.shape[:-1], k.shape[-2]), (*batch, q.axes[-2], k.axes[-2]))
    if isinstance(a.attn_mask, Traced):
        context.broadcast([scores, a.attn_mask], scores.shape)
    value = context.output([*batch, context.live(q.axes[-2]), context.live(v.axes[-1])])
    context.cost(scores, context.live(q.axes[-1]), q.shape[-1])
    context.cost(value, context.live(k.axes[-2]), k.shape[-2])
    return value


# ---- elementwise, reductions -------------------------------------------------------------------


def elementwise(context: Context, a: Arguments) -> Traced:
    values = [v for v in vars(a).values() if isinstance(v, Traced)]
    return context.output(context.broadcast(values, shape_of(context.meta)))


def constant(context: Context, a: Arguments) -> Any:
    """A new tensor whose size was worked out in Python."""
    return context.outputs([None] * len(shape_of(context.meta)))


def along_dims(context: Context, a: Arguments) -> Traced:
    """Moves entries along some dimensions, which therefore stay as they are."""
    for dim in a.dims:
        context.solver.fix(a.self.axes[dim], f"reordered by {context.op} in {context.layer}")
    return context.output([context.live(axis) for axis in a.self.axes])


def reduction(context: Context, a: Arguments) -> Any:
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


def spatial_rank(op: str) -> int:
    return next((n for n in (1, 2, 3) if f"{n}d" in op), 1)


# ---- views and joins ---------------------------------------------------------------------------


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


def unsqueeze(context: Context, a: Arguments) -> Traced:
    axes = list(a.self.axes)
    axes.insert(a.dim % (len(axes) + 1), None)
    return context.output(axes)


def expand(context: Context, a: Arguments) -> Traced:
    return context.output(context.broadcast([a.self], shape_of(context.meta)))


def cat(context: Context, a: Arguments) -> Traced:
    tensors = [t for t in a.tensors if len(t.shape) > 1 or t.shape[0] > 0]
    shape = shape_of(context.meta)
    dim = getattr(a, "dim", 0) % len(shape)
    others = [
        Traced((*t.shape[:dim], 1, *t.shape[dim + 1 :]), t.axes[:dim] + (None,) + t.axes[dim + 1 :])
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
        if len(set(sizes)) == 1:
            parts = context.equal_parts(axis, len(sizes))
        else:
            context.solver.fix(axis, f"cut into unequal parts {sizes} by {context.op}")
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
    context.solver.fix(a.self.axes[dim], f"indexed by {context.op} in {context.layer}")
    return context.output([context.live(x) for i, x in enumerate(a.self.axes) if i != dim])


def slice_(context: Context, a: Arguments) -> Traced:
    dim = a.dim % len(a.self.shape)
    full, kept = a.self.shape[dim], shape_of(context.meta)[dim]
    axes = [context.live(axis) for axis in a.self.axes]
    axis = axes[dim]
    if axis is not None and kept != full:
        start = (a.start or 0) % full
        if getattr(a, "step", 1) == 1 and full % kept == 0 and start % kept == 0:
            axes[dim] = context.equal_parts(axis, full // kept)[start // kept]
        else:
            context.solver.fix(axis, f"sliced to {kept} of {full} in {context.layer}")
            axes[dim] = None
    return context.output(axes)


def index(context: Context, a: Arguments) -> Traced:
    indexed = [i for i, tensor in enumerate(a.indices) if tensor is not None]
    context.fix_all(a.indices, "is used as an index")
    for i in indexed:
        context.solver.fix(a.self.axes[i], f"indexed by {context.op} in {context.layer}")
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        context.fix_all([a.self], f"indexed by {context.op} in {context.layer}")
        return context.output([None] * len(shape_of(context.meta)))
    rank = max(len(a.indices[i].shape) for i in indexed)
    axes = [context.live(axis) for axis in a.self.axes]
    return context.output([*axes[: indexed[0]], *[None] * rank, *axes[indexed[-1] + 1 :]])


def pad(context: Context, a: Arguments) -> Traced:
    axes = [context.live(axis) for axis in a.self.axes]
    for i in range(len(a.pad) // 2):
        if a.pad[2 * i] or a.pad[2 * i + 1]:
            context.solver.fix(axes[-1 - i], f"padded by {context.op} in {context.layer}")
            axes[-1 - i] = None
    return context.output(axes)


def pixel_shuffle(context: Context, a: Arguments) -> Traced:
    *lead, channels, height, width = a.self.shape
    r = a.upscale_factor
    split = Context(
        **{
            **vars(context),
            "meta": context.meta.new_empty((*lead, channels // (r * r), r * r, height, width)),
        }
    )
    inner = reshape(split, a.self, (*lead, channels // (r * r), r * r, height, width))
    return context.output([*inner.axes[:-3], None, None])


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


def _times(axis: TracedAxis, multiplicity: int) -> TracedAxis:
    assert axis is not None
    return tuple((variable, m * multiplicity) for variable, m in axis)


# ---- the table ---------------------------------------------------------------------------------


def _rows(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


# Operations whose result is a layer's output.
MAKERS: dict[str, Rule] = {
    **_rows(convolution, "conv1d conv2d conv3d"),
    **_rows(transposed_convolution, "conv_transpose1d conv_transpose2d conv_transpose3d"),
    **_rows(linear, "linear"),
}

RULES: dict[str, Rule] = {
    **MAKERS,
    **_rows(batch_norm, "batch_norm instance_norm"),
    **_rows(layer_norm, "layer_norm rms_norm"),
    **_rows(group_norm, "group_norm"),
    **_rows(prelu, "prelu"),
    **_rows(embedding, "embedding"),
    **_rows(weight_norm, "_weight_norm"),
    **_rows(matmul, "matmul mm bmm"),
    **_rows(addmm, "addmm"),
    **_rows(einsum, "einsum"),
    **_rows(attention, "scaled_dot_product_attention"),
    **_rows(
        elementwise,
        "add sub rsub mul div pow maximum minimum where neg abs exp log sqrt rsqrt reciprocal "
        "sin cos tanh sigmoid relu relu6 silu gelu elu selu celu leaky_relu hardtanh hardswish "
        "hardsigmoid mish softplus softsign logsigmoid hardshrink softshrink tanhshrink threshold "
        "rrelu clamp clamp_min clamp_max erf square round floor sign lerp addcmul softmax "
        "log_softmax _safe_softmax cumsum dropout feature_dropout alpha_dropout "
        "feature_alpha_dropout dropout2d contiguous clone to _to_copy alias detach "
        "lift_fresh_copy type_as masked_fill fill zero eq ne lt le gt ge logical_not logical_and "
        "logical_or bitwise_not bitwise_and bitwise_or isnan zeros_like ones_like rand_like "
        "full_like empty_like randn_like bernoulli copy positive "
        "normalize nan_to_num remainder fmod expm1 log1p",
    ),
    **_rows(
        constant, "new_zeros new_ones new_empty new_full zeros ones empty full arange rand randn"
    ),
    **_rows(along_dims, "roll flip"),
    **_rows(
        reduction,
        "mean sum amax amin max min prod var std linalg_vector_norm norm logsumexp all any",
    ),
    **_rows(
        spatial,
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
        "upsample_nearest_exact2d _upsample_nearest_exact2d reflection_pad1d reflection_pad2d "
        "replication_pad1d replication_pad2d",
    ),
    **_rows(view, "view reshape flatten unflatten _unsafe_view squeeze view_as reshape_as"),
    **_rows(permute, "permute"),
    **_rows(transpose, "transpose swapaxes swapdims t numpy_T"),
    **_rows(unsqueeze, "unsqueeze"),
    **_rows(expand, "expand expand_as broadcast_to"),
    **_rows(cat, "cat concat concatenate"),
    **_rows(stack, "stack"),
    **_rows(chunk, "chunk split split_with_sizes tensor_split"),
    **_rows(unbind, "unbind"),
    **_rows(select, "select"),
    **_rows(slice_, "slice narrow"),
    **_rows(index, "index"),
    **_rows(pad, "pad constant_pad_nd"),
    **_rows(pixel_shuffle, "pixel_shuffle"),
    **_rows(pixel_unshuffle, "pixel_unshuffle"),
    **_rows(channel_shuffle, "channel_shuffle native_channel_shuffle"),
    **_rows(glu, "glu"),
}
