"""The attributes of torch's own layers that follow the width: `out_channels`, `num_groups`, ..."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from anywidth.planning.groups import AttributeSlot, Axis, Segment

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# For each kind of module: the attribute, and the axis of the weight whose size it has.
_SIZES: list[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str, int]] = [
    (_CONVOLUTIONS, "out_channels", 0),
    (_TRANSPOSED, "in_channels", 0),
    (nn.Linear, "out_features", 0),
    (nn.Linear, "in_features", 1),
    ((nn.Embedding, nn.EmbeddingBag), "embedding_dim", 1),
    (nn.PReLU, "num_parameters", 0),
    (nn.GroupNorm, "num_channels", 0),
    (_NormBase, "num_features", 0),
]


def attribute_slots(model: nn.Module, tensors: dict[str, tuple[Axis, ...]]) -> list[AttributeSlot]:
    """The attributes of torch's own layers that a narrowed module must show."""
    slots: list[AttributeSlot] = []
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shared = {id(held[name]): axes for name, axes in tensors.items() if name in held}
    for path, module in model.named_modules():
        if isinstance(module, nn.Transformer):
            slots += _transformer_slots(path, module, tensors)
        # A tied weight has one name, but several owners.
        axes = _weight_axes(path, tensors) or shared.get(id(module._parameters.get("weight")))
        if axes is None:
            continue
        for kinds, attribute, axis in _SIZES:
            if isinstance(module, kinds) and axes[axis] is not None:
                slots.append(AttributeSlot(path, attribute, axes[axis] or ()))
        if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)):
            slots += _convolution_slots(path, module, axes)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            slots += [
                AttributeSlot(path, "normalized_shape", axis, index)
                for index, axis in enumerate(axes)
                if axis is not None
            ]
        if isinstance(module, nn.GroupNorm) and module.num_groups > 1 and axes[0] is not None:
            per_group = module.num_channels // module.num_groups
            groups = divide(axes[0], per_group)
            if groups is not None:
                slots.append(AttributeSlot(path, "num_groups", groups))
    return slots


def _transformer_slots(
    path: str, module: nn.Transformer, tensors: dict[str, tuple[Axis, ...]]
) -> list[AttributeSlot]:
    """`nn.Transformer` checks its inputs with an attribute that has the size of its attention."""
    for inner, attention in module.named_modules(prefix=path):
        if isinstance(attention, nn.MultiheadAttention):
            width = tensors.get(f"{inner}.out_proj.weight", (None,))[0]
            return [] if width is None else [AttributeSlot(path, "d_model", width)]
    return []


def _convolution_slots(path: str, module: Any, axes: tuple[Axis, ...]) -> list[AttributeSlot]:
    transposed = isinstance(module, _TRANSPOSED)
    other = "out_channels" if transposed else "in_channels"
    if axes[1] is not None:  # all groups narrow, or the only one
        return [AttributeSlot(path, other, axes[1] * module.groups)]
    if module.groups == 1:
        return []
    own, across = module.out_channels, module.in_channels
    if transposed:
        own, across = across, own
    groups = None if axes[0] is None else divide(axes[0], own // module.groups)
    if groups is None:
        return []
    inside = across // module.groups
    return [
        AttributeSlot(path, "groups", groups),
        AttributeSlot(path, other, tuple(Segment(g, n * inside) for g, n in groups)),
    ]


def divide(axis: tuple[Segment, ...], by: int) -> tuple[Segment, ...] | None:
    """The axis with `by` entries merged into one; None if there is a remainder."""
    if any(segment.per_unit % by for segment in axis):
        return None
    return tuple(Segment(segment.group, segment.per_unit // by) for segment in axis)


def _weight_axes(path: str, tensors: dict[str, tuple[Axis, ...]]) -> tuple[Axis, ...] | None:
    """A module's weight, plain or under either style of weight norm (or another of torch's)."""
    prefix = f"{path}." if path else ""
    for name in ("weight", "weight_v", "weight_orig", "parametrizations.weight.original1",
                 "parametrizations.weight.original", "running_mean"):  # fmt: skip
        # Spectral norm has a weight_v too, which is a vector.
        is_direction = name != "weight_v" or prefix + "weight_g" in tensors
        if is_direction and prefix + name in tensors:
            return tensors[prefix + name]
    return None
