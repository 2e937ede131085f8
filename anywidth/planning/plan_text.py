"""A plan as a readable table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anywidth.planning.held_back import HeldBack
from anywidth.planning.parts import ChannelGroup

if TYPE_CHECKING:
    from anywidth.planning.groups import Plan

# A smaller share of the multiply-adds is not worth a line.
LEAST_SHARE = 0.01


def plan_to_text(plan: Plan) -> str:
    """The groups with their layers and reasons to be fixed, and multiply-adds at a few widths."""
    narrow, layers = plan.elastic_layers()
    lines = [
        f"{narrow} of {layers} layers have an elastic output; "
        f"{plan.elastic_share():.0%} of the multiply-adds narrow",
        "",
    ]
    rows = [["group", "channels", "role", "made by", "read by", ""]]
    for group in plan.groups.values():
        size = str(group.channels) + (f" by {group.unit}" if group.unit > 1 else "")
        cells = [group.name, size, ", ".join(group.roles), _few(group.makers)]
        rows.append([*cells, _few(group.readers), remark(group)])
    if not any(row[2] for row in rows[1:]):
        rows = [[*row[:2], *row[3:]] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    low, high = plan.widths.low, plan.widths.high
    lines += [f"note: {note}" for note in [*plan.notes, *held_lines(plan.held_back(), low)]]
    lines += ["", "width  multiply-adds"]
    for width in dict.fromkeys(round(low + i * (high - low) / 3, 3) for i in (3, 2, 1, 0)):
        lines.append(f"{width:<5}  {plan.macs(plan.resolve(width)):,}")
    return "\n".join(lines)


def held_lines(held: Sequence[HeldBack], low: float) -> list[str]:
    """What stays whole, as notes."""
    return [f"what stays whole at {low:g} costs {one}" for one in held if one.share >= LEAST_SHARE]


def _few(names: tuple[str, ...]) -> str:
    # What the model's own forward computes has no name.
    return ", ".join(name or "the model itself" for name in names[:2]) + (
        f", … {len(names) - 2} more" if len(names) > 2 else ""
    )


def remark(group: ChannelGroup) -> str:
    if group.tied is not None:
        return f"{group.tied[1]} x {group.tied[0]}"
    if group.fixed is not None:
        return f"fixed: {group.fixed}"
    return f"divisor {group.divisor}" if group.divisor else ""
