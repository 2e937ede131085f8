"""Groups of channels that shrink together, and the plan that lists them."""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from anywidth.errors import AnywidthError
from anywidth.width import ChannelConfig, Width, WidthRange, check_divisor, round_channels


class Segment(NamedTuple):
    """A stretch of an axis: `per_unit` entries for every `unit` active channels of a group."""

    group: str
    per_unit: int


# The segments of one axis in order; None for an axis whose size never changes.
Axis = tuple[Segment, ...] | None


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that must be narrowed together.

    Args:
        name: the layer that makes these channels first.
        channels: how many there are at full width.
        unit: active counts are multiples of this (a head, or the channels of one convolution
            group); 1 for ordinary channels.
        divisor: rounding for this group alone; None takes the width range's.
        fixed: why the group always runs in full; None where it is elastic.
        tied: (other group, multiple): this group has `multiple` times the other's channels.
        makers: layers whose output these channels are.
        readers: layers that take them as input.
    """

    name: str
    channels: int
    unit: int = 1
    divisor: int | None = None
    fixed: str | None = None
    tied: tuple[str, int] | None = None
    makers: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()

    def round(self, channels: float, divisor: int) -> int:
        """The nearest count this group may have, by the rounding rule."""
        step = self.divisor or divisor
        if step > self.channels:
            step = 1  # a divisor larger than the whole group would never let it narrow
        step = step * self.unit // math.gcd(step, self.unit)
        if step > self.channels:
            step = self.unit
        return min(self.channels, round_channels(channels, step))


@dataclass(frozen=True)
class CostTerm:
    """Multiply-adds of one operation: `factor` times the sizes of its elastic axes."""

    layer: str
    factor: int
    axes: tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True)
class AttributeSlot:
    """A whole-number attribute of a module that follows the size of an axis.

    With `index`, the attribute is a tuple and one of its entries follows.
    """

    module: str
    attribute: str
    axis: tuple[Segment, ...]
    index: int | None = None


@dataclass
class Plan:
    """Which channels of a network shrink together; printable, editable, saved as JSON.

    Nothing in the network has changed yet: `anywidth.slimmable(model, plan)` applies it.

    Args:
        groups: by name, in the order of the network.
        tensors: for each parameter and buffer by its `state_dict` name, its axes.
        shapes: the full shape of each of those tensors.
        parameters: those of them that are parameters.
        attributes: module attributes that follow an axis (a number of heads, say).
        costs: multiply-adds of one example, an operation each.
        inputs: for each weight that output averaging scales, the index of its input axis.
        outputs: for each convolution and linear layer in order, the axis it makes.
        folds: (layer, batch norm) pairs where the norm alone reads the layer's output.
        example: the shape and dtype of each input the plan was made with.
        notes: what a reader should know of how the plan came to be.
        widths: the range and divisor that `resolve` works with.
    """

    groups: dict[str, ChannelGroup]
    tensors: dict[str, tuple[Axis, ...]]
    shapes: dict[str, tuple[int, ...]]
    parameters: tuple[str, ...] = ()
    attributes: list[AttributeSlot] = field(default_factory=list)
    costs: list[CostTerm] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, Axis] = field(default_factory=dict)
    folds: list[tuple[str, str]] = field(default_factory=list)
    example: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    widths: WidthRange = field(default_factory=WidthRange)

    # ---- widths -----------------------------------------------------------------------------

    def resolve(self, width: Width | Mapping[str, float]) -> ChannelConfig:
        """The channels that a width comes to.

        `width` is a float (the same fraction everywhere), a mapping from group names to
        fractions (groups not named stay full), or a `ChannelConfig`, which is checked.
        """
        if isinstance(width, ChannelConfig):
            self.check(width)
            return width
        if isinstance(width, Mapping):
            for name, value in width.items():
                self.group(name)
                self.widths.check(value)
            fractions = {name: width.get(name, 1.0) for name in self.groups}
        else:
            self.widths.check(width)
            fractions = dict.fromkeys(self.groups, width)
        channels: dict[str, int] = {}
        for name in self.base_first():
            group = self.groups[name]
            if group.tied is not None:
                base, multiple = group.tied
                channels[name] = channels[base] * multiple
            elif group.fixed is not None:
                channels[name] = group.channels
            else:
                channels[name] = group.round(group.channels * fractions[name], self.widths.divisor)
        return ChannelConfig(tuple((name, channels[name]) for name in self.groups))

    def check(self, config: ChannelConfig) -> None:
        """Raises unless `config` is a configuration of this network."""
        if tuple(config) != tuple(self.groups):
            missing = [name for name in self.groups if name not in set(config)]
            unknown = [name for name in config if name not in self.groups]
            raise AnywidthError(
                "this configuration is for another network: "
                f"it lacks {missing[:5]} and has unknown groups {unknown[:5]}; "
                "make one with plan.resolve(width)"
            )
        for name, active in config.items():
            group = self.groups[name]
            if not 1 <= active <= group.channels or active % group.unit:
                raise AnywidthError(
                    f"group {name!r} cannot run {active} channels: expected a multiple of "
                    f"{group.unit} from {group.unit} to {group.channels}"
                )
            if group.tied is not None and active != config[group.tied[0]] * group.tied[1]:
                base, multiple = group.tied
                raise AnywidthError(
                    f"group {name!r} is tied to {multiple} times {base!r}: expected "
                    f"{config[base] * multiple} channels, not {active}"
                )
            if group.tied is None and group.fixed is not None and active != group.channels:
                raise AnywidthError(
                    f"group {name!r} is fixed at {group.channels} channels ({group.fixed}), "
                    f"so it cannot run {active}"
                )

    @property
    def full(self) -> ChannelConfig:
        return ChannelConfig(tuple((name, g.channels) for name, g in self.groups.items()))

    @property
    def widest(self) -> ChannelConfig:
        return self.resolve(self.widths.high)

    @property
    def narrowest(self) -> ChannelConfig:
        return self.resolve(self.widths.low)

    def lattice(self, count: int | None = None) -> list[ChannelConfig]:
        """The distinct configurations that uniform widths come to, narrowest first.

        With `count`, that many of them, evenly spread, the two ends included.
        """
        low, high = self.widths.low, self.widths.high
        edges = {low, high}
        for group in self.elastic():
            size = group.channels
            for active in range(1, size + 1):
                # round_channels changes only where channels + divisor/2 crosses a multiple or
                # at the 90 % rule: both lie on halves of channels or on active / 0.9.
                for edge in ((active - 0.5) / size, active / size, active / (0.9 * size)):
                    if low < edge < high:
                        edges.add(edge)
        ordered = sorted(edges)
        probes = ordered + [(a + b) / 2 for a, b in zip(ordered, ordered[1:], strict=False)]
        found = list(dict.fromkeys(self.resolve(width) for width in sorted(probes)))
        if count is None or count >= len(found):
            return found
        if count < 2:
            raise AnywidthError(f"a lattice of {count} widths: expected at least 2 (the ends)")
        last = len(found) - 1
        return [found[round(i * last / (count - 1))] for i in range(count)]

    def elastic(self) -> list[ChannelGroup]:
        """The groups whose size can be chosen, in the order of the network."""
        return [g for g in self.groups.values() if g.fixed is None and g.tied is None]

    # ---- sizes ------------------------------------------------------------------------------

    def axis_size(self, axis: Sequence[Segment], config: ChannelConfig) -> int:
        """How many entries of an axis are active."""
        return sum(config[s.group] // self.groups[s.group].unit * s.per_unit for s in axis)

    def axis_ranges(
        self, axis: Sequence[Segment], config: ChannelConfig
    ) -> tuple[tuple[int, int], ...]:
        """The active entries of an axis as (start, length), neighbours joined."""
        ranges: list[tuple[int, int]] = []
        start = 0
        for group_name, per_unit in axis:
            group = self.groups[group_name]
            length = config[group_name] // group.unit * per_unit
            if ranges and sum(ranges[-1]) == start:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
            else:
                ranges.append((start, length))
            start += group.channels // group.unit * per_unit
        return tuple(ranges)

    # ---- editing ----------------------------------------------------------------------------

    def group(self, name: str) -> ChannelGroup:
        if name not in self.groups:
            ordered = sorted(self.groups)
            near = ordered[max(0, bisect.bisect(ordered, name) - 2) :][:4]
            raise AnywidthError(
                f"no group {name!r} in this plan; near it are {near}, and print(plan) lists all"
            )
        return self.groups[name]

    def group_of(self, layer: str) -> ChannelGroup:
        """The group that a convolution or linear layer's output belongs to."""
        return self._only(layer, [g for g in self.groups.values() if layer in g.makers], "makes")

    def group_read_by(self, layer: str) -> ChannelGroup:
        """The group that a convolution or linear layer's input belongs to."""
        return self._only(layer, [g for g in self.groups.values() if layer in g.readers], "reads")

    def _only(self, layer: str, found: list[ChannelGroup], verb: str) -> ChannelGroup:
        if layer not in self.outputs:
            raise AnywidthError(
                f"no convolution or linear layer {layer!r} in this plan; "
                f"the first are {list(self.outputs)[:5]}"
            )
        if len(found) != 1:
            names = [group.name for group in found]
            raise AnywidthError(f"{layer!r} {verb} {len(names)} groups {names}: name one of them")
        return found[0]

    def pin(self, name: str, reason: str = "pinned by the user") -> None:
        """Keeps a group at its full size."""
        self.groups[name] = replace(self.group(name), fixed=reason, tied=None)

    def tie(self, name: str, base: str, multiple: int) -> None:
        """Gives a group always `multiple` times the channels of another."""
        group, other = self.group(name), self.group(base)
        if other.channels * multiple != group.channels:
            raise AnywidthError(
                f"group {name!r} has {group.channels} channels, which is not {multiple} times "
                f"the {other.channels} of {base!r}"
            )
        if other.unit * multiple % group.unit:
            raise AnywidthError(
                f"group {name!r} runs multiples of {group.unit} channels, and {multiple} times "
                f"{base!r} is not always one"
            )
        seen = {name}
        link: str | None = base
        while link is not None:
            if link in seen:
                raise AnywidthError(f"tying {name!r} to {base!r} would tie it to itself")
            seen.add(link)
            tied = self.groups[link].tied
            link = tied[0] if tied else None
        self.groups[name] = replace(group, tied=(base, multiple), fixed=None)

    def set_divisor(self, name: str, divisor: int) -> None:
        """Rounds one group to its own divisor instead of the width range's."""
        check_divisor(divisor, f"group {name!r}")
        self.groups[name] = replace(self.group(name), divisor=divisor)

    def copy(self) -> Plan:
        return copy.deepcopy(self)

    def base_first(self) -> list[str]:
        """Group names, each after the one it is tied to."""
        order: list[str] = []
        seen: set[str] = set()

        def visit(name: str) -> None:
            if name not in seen:
                seen.add(name)
                tied = self.groups[name].tied
                if tied:
                    visit(tied[0])
                order.append(name)

        for name in self.groups:
            visit(name)
        return order

    # ---- reading and writing ----------------------------------------------------------------

    def elastic_layers(self) -> tuple[int, int]:
        """(layers whose whole output is elastic, all convolution and linear layers)."""

        def is_elastic(axis: Axis) -> bool:
            return axis is not None and all(self.can_narrow(s.group) for s in axis)

        return sum(is_elastic(axis) for axis in self.outputs.values()), len(self.outputs)

    def can_narrow(self, name: str) -> bool:
        """Whether a group, or the one it is tied to, is elastic."""
        return self.groups[self.root(name)].fixed is None

    def root(self, name: str) -> str:
        """The group at the end of a group's ties: itself if it has none."""
        tied = self.group(name).tied
        return self.root(tied[0]) if tied else name

    def to_json(self) -> dict[str, Any]:
        from anywidth.plan_text import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        from anywidth.plan_text import plan_from_json

        return plan_from_json(data)

    def __str__(self) -> str:
        from anywidth.plan_text import plan_to_text

        return plan_to_text(self)
