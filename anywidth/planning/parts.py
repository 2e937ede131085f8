"""The parts of a plan: groups of channels, segments of axes, costs, attributes that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from anywidth.width import round_channels


class Segment(NamedTuple):
    """A part of an axis: `per_unit` entries per `unit` active channels of a group."""

    group: str
    per_unit: int


# The segments of one axis in order; None for an axis whose size never changes.
Axis = tuple[Segment, ...] | None


# An argument of the network in a plan: a tensor's shape and dtype, as a dict if the values or the
# range of its integers are kept too; {"value": ...} for a number, text or None; {"items": [...]}
# and {"named": {...}} for a list and a dict of these; {"type": ...} for anything else.
Example = tuple[tuple[int, ...], str] | dict[str, Any]

# How many lists and dicts of an argument may be in each other.
DEEPEST = 8


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that must be narrowed together.

    Args:
        name: the first layer that makes these channels.
        channels: their number at full width.
        unit: active counts are multiples of this: the channels of a head or of one convolution
            group; 1 for ordinary channels.
        divisor: rounding for this group; None uses the width range's. A divisor larger than the
            group acts like 1.
        fixed: the reason why the group always stays whole; None if it is elastic.
        tied: (other group, multiple): this group has `multiple` times the other's channels.
        makers: layers whose output these channels are.
        readers: layers that read them as input.
        roles: the group's part in a network with residuals, of "hidden", "heads" and "mlp";
            `anywidth.Plan.only` explains them.
    """

    name: str
    channels: int
    unit: int = 1
    divisor: int | None = None
    fixed: str | None = None
    tied: tuple[str, int] | None = None
    makers: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    def round(self, channels: float, divisor: int) -> int:
        """The nearest allowed number of channels; the full number is never rounded."""
        if channels >= self.channels:
            return self.channels
        step = self.divisor or divisor
        if step > self.channels:
            step = 1  # a divisor larger than the whole group would never let it narrow
        step = step * self.unit // math.gcd(step, self.unit)
        if step > self.channels:
            step = self.unit
        return min(self.channels, round_channels(channels, step))


@dataclass(frozen=True)
class CostTerm:
    """Multiply-adds of one operation: `factor` times the sizes of its elastic axes.

    `whole` names the groups of layers that are in the factor, because they stay whole.
    """

    layer: str
    factor: int
    axes: tuple[tuple[Segment, ...], ...]
    whole: tuple[str, ...] = ()

    def macs(self, units: Mapping[str, int]) -> int:
        """The multiply-adds for numbers of active units by group."""
        product = self.factor
        for axis in self.axes:
            size = 0  # a generator would take twice the time
            for group, per_unit in axis:
                size += units[group] * per_unit
            product *= size
        return product


@dataclass(frozen=True)
class AttributeSlot:
    """An attribute of a module that follows the size of an axis.

    It is the size itself. With `power` it is a number that is `whole` at full width and follows
    that power of the size. `config.num_heads` is a number of an object that the module holds; at
    other widths it holds a copy. With `index`, the attribute is a tuple and the entry at `index`
    follows.
    """

    module: str
    attribute: str
    axis: tuple[Segment, ...]
    index: int | None = None
    power: float | None = None
    whole: float | None = None

    def value(self, size: int, full: int) -> int | float:
        """The attribute if `size` of the `full` entries of the axis are active."""
        if self.power is None or self.whole is None:
            return size
        return float(self.whole * (size / full) ** self.power)
