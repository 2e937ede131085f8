"""The fields of a plan to and from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anywidth.errors import AnywidthError
from anywidth.planning.parts import AttributeSlot, Axis, ChannelGroup, CostTerm, Segment
from anywidth.width import WidthRange

VERSION = 1


def fields_to_json(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Data for `json.dump`, from the fields of a plan by name."""
    widths: WidthRange = plan["widths"]
    return {
        "version": VERSION,
        "widths": [widths.low, widths.high, widths.divisor],
        "groups": [_group_to_json(group) for group in plan["groups"].values()],
        "tensors": {
            name: {"shape": list(plan["shapes"][name]), "axes": [_axis_to_json(a) for a in axes]}
            for name, axes in plan["tensors"].items()
        },
        "parameters": list(plan["parameters"]),
        "attributes": [
            [s.module, s.attribute, _axis_to_json(s.axis), s.index, s.power, s.whole]
            for s in plan["attributes"]
        ],
        "costs": [
            [cost.layer, cost.factor, [_axis_to_json(axis) for axis in cost.axes]]
            for cost in plan["costs"]
        ],
        "inputs": dict(plan["inputs"]),
        "scales": {
            name: [_axis_to_json(axis), power] for name, (axis, power) in plan["scales"].items()
        },
        "outputs": {layer: _axis_to_json(axis) for layer, axis in plan["outputs"].items()},
        "folds": [list(pair) for pair in plan["folds"]],
        "activations": [list(pair) for pair in plan["activations"]],
        "prologues": [list(chain) for chain in plan["prologues"]],
        "rehearsed": plan["rehearsed"],
        "example": [{**x} if isinstance(x, dict) else [list(x[0]), x[1]] for x in plan["example"]],
        "notes": list(plan["notes"]),
    }


def fields_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan by name; raises if the data is not a plan."""
    version = data.get("version") if isinstance(data, Mapping) else None
    if version != VERSION:
        raise AnywidthError(
            f"plan of version {version!r}: expected version {VERSION}, as plan.to_json() of this "
            "version of anywidth writes it"
        )
    try:
        groups = [_group_from_json(group) for group in data["groups"]]
        return {
            "groups": {group.name: group for group in groups},
            "tensors": {
                name: tuple(_axis_from_json(axis) for axis in tensor["axes"])
                for name, tensor in data["tensors"].items()
            },
            "shapes": {name: tuple(tensor["shape"]) for name, tensor in data["tensors"].items()},
            "parameters": tuple(data["parameters"]),
            "attributes": [
                AttributeSlot(module, attribute, _axis_from_json(axis) or (), *rest)
                for module, attribute, axis, *rest in data["attributes"]
            ],
            "costs": [
                CostTerm(layer, factor, tuple(_axis_from_json(axis) or () for axis in axes))
                for layer, factor, axes in data["costs"]
            ],
            "inputs": dict(data["inputs"]),
            "scales": {
                name: (_axis_from_json(axis) or (), power)
                for name, (axis, power) in data.get("scales", {}).items()
            },
            "outputs": {layer: _axis_from_json(a) for layer, a in data["outputs"].items()},
            "folds": [(layer, norm) for layer, norm in data["folds"]],
            "activations": [(norm, module) for norm, module in data.get("activations", ())],
            "prologues": [
                (norm, module, convolution)
                for norm, module, convolution in data.get("prologues", ())
            ],
            "rehearsed": bool(data.get("rehearsed", False)),
            "example": [
                dict(x) if isinstance(x, Mapping) else (tuple(x[0]), x[1]) for x in data["example"]
            ],
            "notes": list(data["notes"]),
            "widths": WidthRange(*data["widths"]),
        }
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise AnywidthError(
            f"damaged plan: {type(error).__name__}: {error}. "
            "Make it again with anywidth.plan(model, example_input)"
        ) from error


def _group_to_json(group: ChannelGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "channels": group.channels,
        "unit": group.unit,
        "divisor": group.divisor,
        "fixed": group.fixed,
        "tied": None if group.tied is None else list(group.tied),
        "makers": list(group.makers),
        "readers": list(group.readers),
    }


def _group_from_json(data: Mapping[str, Any]) -> ChannelGroup:
    tied = data["tied"]
    lists = {
        "tied": None if tied is None else (tied[0], tied[1]),
        "makers": tuple(data["makers"]),
        "readers": tuple(data["readers"]),
    }
    return ChannelGroup(**{**data, **lists})


def _axis_to_json(axis: Axis) -> list[list[Any]] | None:
    return None if axis is None else [[s.group, s.per_unit] for s in axis]


def _axis_from_json(axis: list[list[Any]] | None) -> Axis:
    return None if axis is None else tuple(Segment(group, per_unit) for group, per_unit in axis)
