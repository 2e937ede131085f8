"""How channels pass through the layers that hold weights, and through norms."""

from __future__ import annotations

import math
from types import SimpleNamespace as Arguments
from typing import Any

from torch import nn

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.solver import Pieces, TracedAxis, scaled
from anywidth.planning.trace.value import Traced, as_constant


def convolution(cursor: Cursor, a: Arguments) -> Traced:
    solver, weight, transposed = cursor.solver, a.weight, "transpose" in cursor.op
    for axis in weight.axes[2:]:
        solver.fix(axis, "size of a convolution kernel")
    channel_axis = len(a.input.shape) - (len(weight.shape) - 1)
    read = a.input.axes[channel_axis]
    # Of channels that repeat (those of all examples, say) every group narrows, and none goes.
    is_narrow_inside = a.groups == 1 or solver.repeated_part(read, a.groups) is not None
    if is_narrow_inside:
        made = _read_groups(cursor, read, weight, a.groups, transposed)
        if weight.name is not None:
            cursor.found.inputs[weight.name] = 0 if transposed else 1
    else:
        # A convolution group is one unit of its inputs and of its outputs: whole groups go.
        groups = cursor.in_units(read, a.groups, a.input.shape[channel_axis] // a.groups)
        made = scaled(groups, cursor.shape[channel_axis] // a.groups)
        cursor.unify(weight.axes[0], read if transposed else made)
        solver.fix(weight.axes[1], "channels within one convolution group")
    if a.bias is not None:
        cursor.unify(made, a.bias.axes[0])
    result = list(a.input.axes)
    for i in range(channel_axis + 1, len(result)):
        if not _keeps_size(cursor, a, i, i - channel_axis - 1):
            solver.fix(result[i], f"convolved over in {cursor.layer}")
            result[i] = None
    result[channel_axis] = made
    value = cursor.output(result)
    # Each output of a convolution meets the whole kernel; of a transposed one, each input.
    counted = value
    if transposed:
        result[channel_axis] = read
        counted = Traced(a.input.shape, tuple(result))
    inner = weight.axes[1] if is_narrow_inside else None
    cursor.count(counted, [(weight.shape[1], inner)], times=math.prod(weight.shape[2:]))
    cursor.make(_owner(cursor, weight), made, weight, can_fold=True)
    return value


def deformed_convolution(cursor: Cursor, a: Arguments) -> Traced:
    """A convolution that reads at places which another layer gives, for parts of its channels."""
    cursor.fix([a.offset, a.mask], f"places to read in {cursor.place}")
    for axis in a.weight.axes[2:]:
        cursor.solver.fix(axis, "size of a convolution kernel")
    read, made = a.input.axes[1], a.weight.axes[0]
    if a.groups > 1:
        groups = cursor.in_units(read, a.groups, a.input.shape[1] // a.groups)
        cursor.unify(made, scaled(groups, a.weight.shape[0] // a.groups))
        cursor.solver.fix(a.weight.axes[1], "channels within one convolution group")
    else:
        _read(cursor, read, a.weight, 1)
    if a.offset_groups > 1 and read is not None:
        cursor.equal_parts(read, a.offset_groups)
    cursor.unify(made, a.bias.axes[0])
    for name, axis in (("in_channels", read), ("out_channels", made)):
        cursor.attribute(name, axis)
    value = cursor.output([a.input.axes[0], made, None, None])
    inner = a.weight.axes[1] if a.groups == 1 else None
    cursor.count(value, [(a.weight.shape[1], inner)], times=math.prod(a.weight.shape[2:]))
    cursor.make(_owner(cursor, a.weight), made, a.weight, can_fold=False)
    return value


def _read_groups(
    cursor: Cursor, read: TracedAxis, weight: Traced, groups: int, transposed: bool
) -> TracedAxis:
    """Ties what each group reads to the weight; returns the axis that all of them make."""
    if groups == 1:
        _read(cursor, read, weight, 0 if transposed else 1)
        return weight.axes[1 if transposed else 0]
    if transposed:
        cursor.unify(read, weight.axes[0])
        made = weight.axes[1]
    else:
        cursor.unify(cursor.solver.repeated_part(read, groups), weight.axes[1])
        outputs = weight.axes[0]
        made = None if outputs is None else cursor.equal_parts(outputs, groups)[0]
    return None if made is None else made * groups


def _keeps_size(cursor: Cursor, a: Arguments, dim: int, place: int) -> bool:
    """Whether a convolution over a dimension leaves the first channels there the first.

    It does if it pads with zeros: those that are left out are zeros too. The positions of a
    learned picture are no channels.
    """
    pieces = cursor.solver.pieces(a.input.axes[dim])
    if len(pieces) != 1 or pieces[0][0] not in cursor.solver.variables(cursor.found.made):
        return False
    step = a.stride[place if len(a.stride) > 1 else 0]
    return step == 1 and cursor.shape[dim] == a.input.shape[dim]


def linear(cursor: Cursor, a: Arguments) -> Traced:
    is_matrix = len(a.weight.shape) == 2
    made = a.weight.axes[0] if is_matrix else None
    inner = a.weight.axes[-1]
    _read(cursor, a.input.axes[-1], a.weight, len(a.weight.shape) - 1)
    if a.weight.name is not None:
        cursor.found.inputs[a.weight.name] = 1
    if a.bias is not None:
        cursor.unify(made, a.bias.axes[0])
    value = cursor.output([*a.input.axes[:-1], *([made] if is_matrix else [])])
    cursor.count(value, [(a.input.shape[-1], inner)])
    # A norm after it takes axis 1 for the channels.
    cursor.make(_owner(cursor, a.weight), made, a.weight, can_fold=len(value.shape) == 2)
    return value


def _owner(cursor: Cursor, weight: Traced) -> str:
    """The layer that holds a weight, which may be another than the one that applies it."""
    path, parametrized, _ = (weight.name or "").partition("parametrizations.")
    owner = path.rstrip(".") if parametrized else path.rpartition(".")[0]
    return owner or cursor.layer


def _read(cursor: Cursor, read: TracedAxis, weight: Traced, in_axis: int) -> None:
    layer, inner = _owner(cursor, weight), weight.axes[in_axis]
    cursor.found.readers.append((layer, inner))
    if read is None:
        cursor.solver.fix(inner, f"{layer or cursor.op} reads an axis of constant size")
    else:
        cursor.unify(read, inner)


def _unify_channels(cursor: Cursor, value: Traced, *vectors: Any) -> Traced:
    """Ties vectors of one number per channel to the channels of a tensor, which stays as it is."""
    for vector in vectors:
        if vector is not None:
            cursor.unify(value.axes[1], vector.axes[0])
    return cursor.output(value.axes)


def batch_norm(cursor: Cursor, a: Arguments) -> Traced:
    if a.weight is None and a.running_mean is None:
        cursor.attribute("num_features", a.input.axes[1])
    return _unify_channels(cursor, a.input, a.weight, a.bias, a.running_mean, a.running_var)


def layer_norm(cursor: Cursor, a: Arguments) -> Traced:
    count = len(a.normalized_shape)
    for tensor in (a.weight, getattr(a, "bias", None)):
        if tensor is not None:
            for i in range(count):
                cursor.unify(a.input.axes[i - count], tensor.axes[i])
    if a.weight is None or not isinstance(cursor.module, nn.LayerNorm | nn.RMSNorm):
        for i in range(count):
            cursor.attribute("normalized_shape", a.input.axes[i - count], i)
    return cursor.output(a.input.axes)


def group_norm(cursor: Cursor, a: Arguments) -> Traced:
    channels = a.input.axes[1]
    if a.num_groups > 1 and channels is not None:
        cursor.attribute("num_groups", _normed_groups(cursor, channels, a.num_groups))
    if a.weight is None:
        cursor.attribute("num_channels", channels)
    return _unify_channels(cursor, a.input, a.weight, a.bias)


def _normed_groups(cursor: Cursor, channels: Pieces, count: int) -> TracedAxis:
    """The groups that channels are normalised in: whole ones go.

    Of channels that were joined and do not end where groups do, each part gives as many.
    """
    solver, pieces = cursor.solver, cursor.solver.pieces(channels)
    size = solver.size(channels) // count
    sizes = [solver.units(variable) * m for variable, m in pieces]
    is_uneven = any(end % size for end in solver.ends(channels))
    is_kept = "num_groups" in vars(cursor.module)
    if not is_uneven or not is_kept or any(length % count for length in sizes):
        return cursor.in_units(channels, count, size)
    groups = solver.new(count)
    for piece, length in zip(pieces, sizes, strict=True):
        cursor.unify((piece,), scaled(groups, length // count))
    cursor.found.moving.append(cursor.place)
    return groups


def prelu(cursor: Cursor, a: Arguments) -> Traced:
    is_vector = len(a.self.shape) > 1 and a.weight.shape[0] > 1
    return _unify_channels(cursor, a.self, a.weight if is_vector else None)


def embedding(cursor: Cursor, a: Arguments) -> Any:
    """Entries, or sums or means of them; what a bag returns beside these is about indices."""
    cursor.solver.fix(a.weight.axes[0], "entries of an embedding")
    others = [getattr(a, name, None) for name in ("offsets", "per_sample_weights")]
    cursor.fix([a.indices, *others], "is used as an index")
    cursor.learn(a.weight, a.weight.axes[1])
    if cursor.op == "embedding":
        return cursor.output([*a.indices.axes, a.weight.axes[1]])
    bags, *rest = cursor.meta
    return [cursor.output([None, a.weight.axes[1]], bags), *as_constant(rest)]


def weight_norm(cursor: Cursor, a: Arguments) -> Traced:
    # Over the whole weight (dim=None) the magnitude is one number.
    for size, g, v in zip(a.g.shape, a.g.axes, a.v.axes, strict=len(a.g.shape) > 0):
        if size > 1:
            cursor.unify(g, v)
    return Traced(a.v.shape, a.v.axes, name=a.g.name, source=a.g.name)
