"""A plan as text for people and as JSON for machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anywidth.errors import AnywidthError
from anywidth.groups import AttributeSlot, Axis, ChannelGroup, CostTerm, Plan, Segment
from anywidth.width import WidthRange

VERSION = 1


def plan_to_text(plan: Plan) -> str:
    """Groups, their layers, what is fixed and why, and multiply-adds at a few widths."""
    from anywidth.cost import plan_macs

    elastic, layers = plan.elastic_layers()
    lines = [f"{elastic} of {layers} convolution and linear layers have an elastic output", ""]
    rows = [("group", "channels", "made by", "read by", "")]
    for group in plan.groups.values():
        size = str(group.channels) + (f" by {group.unit}" if group.unit > 1 else "")
        rows.append(
            (group.name, size, _few(group.makers), _few(group.readers), _remark(plan, group))
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    for note in plan.notes:
        lines.append(f"note: {note}")
    lines += ["", "width  multiply-adds"]
    low, high = plan.widths.low, plan.widths.high
    for width in dict.fromkeys(round(low + i * (high - low) / 3, 3) for i in (3, 2, 1, 0)):
        lines.append(f"{width:<5}  {plan_macs(plan, plan.resolve(width)):,}")
    return "\n".join(lines)


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:2]) + (f", … {len(names) - 2} more" if len(names) > 2 else "")


def _remark(plan: Plan, group: ChannelGroup) -> str:
    if group.tied is not None:
        return f"{group.tied[1]} x {group.tied[0]}"
    if group.fixed is not None:
        return f"fixed: {group.fixed}"
    return f"divisor {group.divisor}" if group.divisor else ""


def plan_to_json(plan: Plan) -> dict[str, Any]:
    return {
        "version": VERSION,
        "widths": [plan.widths.low, plan.widths.high, plan.widths.divisor],
        "groups": [
            {
                "name": g.name,
                "channels": g.channels,
                "unit": g.unit,
                "divisor": g.divisor,
                "fixed": g.fixed,
                "tied": None if g.tied is None else list(g.tied),
                "makers": list(g.makers),
                "readers": list(g.readers),
            }
            for g in plan.groups.values()
        ],
        "tensors": {
            name: {"shape": list(plan.shapes[name]), "axes": [_axis_to_json(a) for a in axes]}
            for name, axes in plan.tensors.items()
        },
        "parameters": list(plan.parameters),
        "attributes": [
            [s.module, s.attribute, _axis_to_json(s.axis), s.index] for s in plan.attributes
        ],
        "costs": [[c.layer, c.factor, [_axis_to_json(a) for a in c.axes]] for c in plan.costs],
        "inputs": plan.inputs,
        "outputs": {layer: _axis_to_json(axis) for layer, axis in plan.outputs.items()},
        "folds": [list(pair) for pair in plan.folds],
        "example": [[list(shape), dtype] for shape, dtype in plan.example],
        "notes": plan.notes,
    }


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    version = data.get("version") if isinstance(data, Mapping) else None
    if version != VERSION:
        raise AnywidthError(f"a plan of version {version!r}: expected version {VERSION}")
    try:
        groups = [
            ChannelGroup(
                **{
                    **g,
                    "tied": None if g["tied"] is None else (g["tied"][0], g["tied"][1]),
                    "makers": tuple(g["makers"]),
                    "readers": tuple(g["readers"]),
                }
            )
            for g in data["groups"]
        ]
        return Plan(
            groups={g.name: g for g in groups},
            tensors={
                name: tuple(_axis_from_json(a) for a in t["axes"])
                for name, t in data["tensors"].items()
            },
            shapes={name: tuple(t["shape"]) for name, t in data["tensors"].items()},
            parameters=tuple(data["parameters"]),
            attributes=[
                AttributeSlot(module, attribute, _axis_from_json(axis) or (), index)
                for module, attribute, axis, index in data["attributes"]
            ],
            costs=[
                CostTerm(layer, factor, tuple(_axis_from_json(a) or () for a in axes))
                for layer, factor, axes in data["costs"]
            ],
            inputs=dict(data["inputs"]),
            outputs={layer: _axis_from_json(a) for layer, a in data["outputs"].items()},
            folds=[(layer, norm) for layer, norm in data["folds"]],
            example=[(tuple(shape), dtype) for shape, dtype in data["example"]],
            notes=list(data["notes"]),
            widths=WidthRange(*data["widths"]),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise AnywidthError(f"a damaged plan: {type(error).__name__}: {error}") from error


def _axis_to_json(axis: Axis) -> list[list[Any]] | None:
    return None if axis is None else [[s.group, s.per_unit] for s in axis]


def _axis_from_json(axis: list[list[Any]] | None) -> Axis:
    return None if axis is None else tuple(Segment(group, per_unit) for group, per_unit in axis)
