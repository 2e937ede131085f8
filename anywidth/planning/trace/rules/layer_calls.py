"""How channels pass through the layers that hold weights, and through norms."""

from __future__ import annotations

import math
from types import SimpleNamespace as Arguments

from torch import nn

from anywidth.planning.trace.solver import TracedAxis
from anywidth.planning.trace.value import Context, Traced, shape_of


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
    in_axis = 0 if transposed else 1
    is_narrow_inside = a.groups == 1 or _repeats(context, read, a.groups)
    if is_narrow_inside:
        made = _read_groups(context, read, weight, a.groups, transposed)
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
        made = context.live(outputs)
    if a.bias is not None:
        context.unify(made, a.bias.axes[0])
    made = context.live(made)
    result = list(a.input.axes)
    for i in range(channel_axis + 1, len(result)):
        if not _keeps_size(context, a, i, i - channel_axis - 1):
            solver.fix(result[i], f"convolved over in {context.layer}")
            result[i] = None
    result[channel_axis] = made
    value = context.output(result)
    # Each output of a convolution meets the whole kernel; of a transposed one, each input.
    counted = value
    if transposed:
        lead = (*a.input.axes[:channel_axis], context.live(read))
        counted = Traced(a.input.shape, (*lead, *result[channel_axis + 1 :]))
    inner = context.live(weight.axes[1]) if is_narrow_inside else None
    context.cost(counted, [(weight.shape[1], inner)], times=math.prod(weight.shape[2:]))
    context.makers.append((_owner(context, weight), made))
    if context.is_learned(weight):
        context.made.append(made)
    context.is_foldable = weight.scale_name is not None
    return value


def _repeats(context: Context, axis: TracedAxis, times: int) -> bool:
    """Whether an axis is the same channels again and again, as those of all examples are.

    Then every group of a convolution narrows, and none goes.
    """
    pieces = context.solver.expand(axis or ())
    count = len(pieces) // times
    return count > 0 and pieces == pieces[:count] * times


def _read_groups(
    context: Context, read: TracedAxis, weight: Traced, groups: int, transposed: bool
) -> TracedAxis:
    """Ties what each group reads to the weight; returns the axis that all of them make."""
    if groups == 1:
        _read(context, read, weight, 0 if transposed else 1)
        return weight.axes[1 if transposed else 0]
    pieces = context.solver.expand(read or ())
    if transposed:
        context.unify(read, weight.axes[0])
        made = context.live(weight.axes[1])
    else:
        context.unify(pieces[: len(pieces) // groups], weight.axes[1])
        outputs = context.live(weight.axes[0])
        made = None if outputs is None else context.equal_parts(outputs, groups)[0]
    return None if made is None else made * groups


def _keeps_size(context: Context, a: Arguments, dim: int, place: int) -> bool:
    """Whether a convolution over a dimension leaves the first channels there the first.

    So it does where it pads with zeros: those that are left out are zeros too. The positions of a
    learned picture are no channels.
    """
    expand = context.solver.expand
    pieces = expand(a.input.axes[dim] or ())
    made = {variable for axis in context.made for variable, _ in expand(axis or ())}
    if len(pieces) != 1 or pieces[0][0] not in made:
        return False
    step = a.stride[place if len(a.stride) > 1 else 0]
    return step == 1 and shape_of(context.meta)[dim] == a.input.shape[dim]


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
    context.cost(value, [(a.input.shape[-1], context.live(inner))])
    context.makers.append((_owner(context, a.weight), context.live(made)))
    if context.is_learned(a.weight):
        context.made.append(made)
    # A norm after it takes axis 1 for the channels.
    context.is_foldable = a.weight.scale_name is not None and len(value.shape) == 2
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
    if a.weight is None and a.running_mean is None:
        context.attribute("num_features", context.live(channels))
    return context.output([context.live(axis) for axis in a.input.axes])


def layer_norm(context: Context, a: Arguments) -> Traced:
    count = len(a.normalized_shape)
    for tensor in (a.weight, getattr(a, "bias", None)):
        if tensor is not None:
            for i in range(count):
                context.unify(a.input.axes[i - count], tensor.axes[i])
    module = context.model.get_submodule(context.layer)
    if a.weight is None or not isinstance(module, nn.LayerNorm | nn.RMSNorm):
        for i in range(count):
            context.attribute("normalized_shape", context.live(a.input.axes[i - count]), i)
    return context.output([context.live(axis) for axis in a.input.axes])


def group_norm(context: Context, a: Arguments) -> Traced:
    channels = a.input.axes[1]
    if a.num_groups > 1:
        groups = context.solver.new(a.num_groups)
        context.unify(channels, _times(groups, a.input.shape[1] // a.num_groups))
        if a.weight is None:
            context.attribute("num_groups", context.live(groups))
    if a.weight is None:
        context.attribute("num_channels", context.live(channels))
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
    if context.is_learned(a.weight):
        context.made.append(a.weight.axes[1])
    return context.output([*a.indices.axes, context.live(a.weight.axes[1])])


def embedding_bag(context: Context, a: Arguments) -> list[Traced]:
    """Sums or means of entries; what it returns beside them is about indices."""
    context.solver.fix(a.weight.axes[0], "entries of an embedding")
    context.fix_all([a.indices, a.offsets, a.per_sample_weights], "is used as an index")
    if context.is_learned(a.weight):
        context.made.append(a.weight.axes[1])
    bags, *others = context.meta
    found = Traced(shape_of(bags), (None, context.live(a.weight.axes[1])))
    return [found, *(Traced(shape_of(meta), (None,) * meta.dim()) for meta in others)]


def weight_norm(context: Context, a: Arguments) -> Traced:
    # Over the whole weight (dim=None) the magnitude is one number.
    for size, g, v in zip(a.g.shape, a.g.axes, a.v.axes, strict=len(a.g.shape) > 0):
        if size > 1:
            context.unify(g, v)
    axes = tuple(context.live(axis) for axis in a.v.axes)
    return Traced(a.v.shape, axes, scale_name=a.g.scale_name)


def recurrent(context: Context, a: Arguments) -> list[Traced]:
    """Runs in full. Every weight meets every step once, and that is its cost."""
    context.fix_all(list(vars(a).values()), f"read or made by the recurrent {context.op}")
    sequence = a.input if hasattr(a, "input") else a.data
    steps = math.prod(sequence.shape[:-1])
    weights = sum(math.prod(w.shape) for w in a.params if len(w.shape) == 2)
    context.cost(Traced((steps,), (None,)), [], times=weights)
    return [Traced(shape_of(meta), (None,) * meta.dim()) for meta in context.meta]


def _times(axis: TracedAxis, multiplicity: int) -> TracedAxis:
    assert axis is not None
    return tuple((variable, m * multiplicity) for variable, m in axis)
