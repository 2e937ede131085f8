"""Checks of a plan that comes from a file: its parts fit each other, and it fits a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from anywidth.errors import AnywidthError
from anywidth.planning.held_numbers import held_number
from anywidth.planning.part_calls import check_parts

if TYPE_CHECKING:
    from anywidth.planning.groups import Plan
    from anywidth.planning.parts import Segment

_AGAIN = "make one with anywidth.plan(model, example_input)"


def check_consistent(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other; their types are known to be right."""
    for name, group in plan.groups.items():
        if group.channels % group.unit:
            raise _damaged(f"group {name!r}: {group.channels} channels in units of {group.unit}")
        _check_tie(plan, name)
    for place, axis in _axes(plan):
        for segment in axis:
            if segment.group not in plan.groups:
                raise _damaged(f"{place} follows a group {segment.group!r}, which it does not have")
    for name, axes in plan.tensors.items():
        shape = plan.shapes[name]
        if len(axes) != len(shape):
            raise _damaged(f"{name!r} has {len(shape)} axes and rules for {len(axes)}")
        for size, one in zip(shape, axes, strict=True):
            found = size if one is None else plan.axis_size(one, plan.full)
            if found != size:
                raise _damaged(f"{name!r} has an axis of {size}, made of {found} channels")
    for name in (*plan.parameters, *plan.inputs, *plan.scales):
        if name not in plan.tensors:
            raise _damaged(f"it names {name!r}, of which it knows no shape")
    for name, index in plan.inputs.items():
        if index >= len(plan.shapes[name]):
            raise _damaged(f"{name!r} has no axis {index}")
    for slot in plan.attributes:
        if not slot.axis or (slot.power is None) != (slot.whole is None):
            raise _damaged(f"{slot.module}.{slot.attribute} follows no axis, or half of a power")


def _check_tie(plan: Plan, name: str) -> None:
    group, seen = plan.groups[name], {name}
    while group.tied is not None:
        base, multiple = group.tied
        if base not in plan.groups or base in seen:
            raise _damaged(f"group {group.name!r} is tied to {base!r}, itself or none")
        other = plan.groups[base]
        if other.channels * multiple != group.channels or other.unit * multiple % group.unit:
            raise _damaged(f"group {group.name!r} is not {multiple} times {base!r}")
        seen.add(base)
        group = other


def _axes(plan: Plan) -> Iterator[tuple[str, tuple[Segment, ...]]]:
    """Every axis of a plan that narrows, and what it belongs to."""
    for name, axes in plan.tensors.items():
        yield from ((repr(name), axis) for axis in axes if axis is not None)
    for slot in plan.attributes:
        yield f"{slot.module}.{slot.attribute}", slot.axis
    for cost in plan.costs:
        yield from ((f"the cost of {cost.layer!r}", axis) for axis in cost.axes)
    for name, (axis, _) in plan.scales.items():
        yield repr(name), axis
    for layer, output in plan.outputs.items():
        if output is not None:
            yield f"the output of {layer!r}", output


def _damaged(why: str) -> AnywidthError:
    return AnywidthError(f"damaged plan: {why}; {_AGAIN}")


# ---- with a network -----------------------------------------------------------------------------


def check_fits(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan of another network."""
    kind = type(model).__name__
    parameters = dict(model.named_parameters(remove_duplicate=False))
    held = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    for name, shape in plan.shapes.items():
        if name not in held:
            raise _other(f"it names {name!r}, which {kind} does not have")
        if tuple(held[name].shape) != shape:
            raise _other(f"{name!r} has shape {tuple(held[name].shape)}, but {shape} in the plan")
        if (name in parameters) != (name in plan.parameters):
            raise _other(f"only one of them has {name!r} as a parameter")
    known = {id(held[name]) for name in plan.shapes}
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise _other(f"it lacks {name!r} of {kind}")
    if plan.parts:
        check_parts(model, plan.parts)
    _check_modules(model, plan)


def _check_modules(model: nn.Module, plan: Plan) -> None:
    """Layers and attributes that the plan names are there, and have the sizes that it says."""
    modules = dict(model.named_modules(remove_duplicate=False))
    together = [*plan.folds, *plan.activations, *plan.prologues, plan.sums]
    followers = [slot.module for slot in plan.attributes]
    for name in [*(name for names in together for name in names), *followers]:
        if name not in modules:
            raise _other(f"it names a layer {name!r}, which {type(model).__name__} does not have")
    for slot in plan.attributes:
        held: Any = held_number(modules[slot.module], slot.attribute)
        if slot.index is not None:
            is_there = isinstance(held, tuple | list) and slot.index < len(held)
            held = held[slot.index] if is_there else None
        size = plan.axis_size(slot.axis, plan.full)
        if held != slot.value(size, size):
            raise _other(
                f"{slot.module}.{slot.attribute} is {held!r}, but {slot.value(size, size)} in the "
                "plan"
            )


def _other(why: str) -> AnywidthError:
    return AnywidthError(f"this plan is for another network: {why}; {_AGAIN}")
