"""The plan: which channels of a network shrink together."""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anywidth.errors import AnywidthError
from anywidth.planning.group_roles import groups_with_roles
from anywidth.planning.held_back import HeldBack, held_back
from anywidth.planning.parts import AttributeSlot, Axis, ChannelGroup, CostTerm, Example, Segment
from anywidth.planning.plan_checks import check_consistent
from anywidth.planning.plan_json import fields_from_json, fields_to_json
from anywidth.planning.plan_text import plan_to_text
from anywidth.width import ChannelConfig, Width, WidthRange, check_whole, whole_number

__all__ = ["AttributeSlot", "Axis", "ChannelGroup", "CostTerm", "Plan", "Segment"]


@dataclass
class Plan:
    """Which channels of a network shrink together; can be printed, edited and saved as JSON.

    A plan does not change the network: `anywidth.slimmable(model, plan)` applies it.

    Args:
        groups: the groups by name, in the order of the network.
        tensors: the axes of each parameter and buffer, by its `state_dict` name.
        shapes: the full shape of each of these tensors.
        parameters: names of those tensors that are parameters.
        attributes: module attributes that follow an axis, such as a number of heads.
        costs: multiply-adds of one example, one entry per operation.
        inputs: the index of the input axis of each weight that output averaging scales.
        scales: the axis and the power of its size that each buffer of one number follows.
        outputs: the axis that each convolution and linear layer makes, in order.
        folds: (layer, batch norm) pairs in which only the norm reads the layer's output.
        activations: (batch norm, activation) pairs in which only the activation reads the norm's
            output.
        prologues: (batch norm, activation, convolution) triples in which only the next one reads
            each output.
        sums: batch norms whose output only a sum with a tensor of the same shape reads.
        rehearsed: whether reshapes that the graph leaves open were checked at another width.
        example: the arguments the plan was made with: for tensors, the shape and dtype.
        notes: remarks for the reader about how the plan was made.
        parts: names of the modules that alone were planned; none if the whole network was.
        widths: the range and divisor that `resolve` uses.
        given: the arguments themselves, until the plan is saved or a network converted with it.
    """

    groups: dict[str, ChannelGroup]
    tensors: dict[str, tuple[Axis, ...]]
    shapes: dict[str, tuple[int, ...]]
    parameters: tuple[str, ...] = ()
    attributes: list[AttributeSlot] = field(default_factory=list)
    costs: list[CostTerm] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    scales: dict[str, tuple[tuple[Segment, ...], float]] = field(default_factory=dict)
    outputs: dict[str, Axis] = field(default_factory=dict)
    folds: list[tuple[str, str]] = field(default_factory=list)
    activations: list[tuple[str, str]] = field(default_factory=list)
    prologues: list[tuple[str, str, str]] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    rehearsed: bool = False
    example: list[Example] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    widths: WidthRange = field(default_factory=WidthRange)
    given: tuple[Any, ...] | None = field(default=None, repr=False, compare=False)
    _is_applied: bool = field(default=False, init=False, repr=False, compare=False)

    # ---- widths -----------------------------------------------------------------------------

    def resolve(self, width: Width | Mapping[str, float]) -> ChannelConfig:
        """The channel configuration of a width.

        `width` is a float (the same fraction everywhere), a mapping from group names to
        fractions (other groups stay full), or a `ChannelConfig`, which is checked.
        """
        if isinstance(width, ChannelConfig):
            config = self._in_order(width)
            self.check(config)
            return config
        if isinstance(width, Mapping):
            given = {name: self.widths.fraction(value) for name, value in width.items()}
            for name, value in given.items():
                self._check_free(self.group(name), value)
            fractions = {name: given.get(name, 1.0) for name in self.groups}
        else:
            fractions = dict.fromkeys(self.groups, self.widths.fraction(width))
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

    def _check_free(self, group: ChannelGroup, fraction: float) -> None:
        if group.tied is not None:
            base, multiple = group.tied
            raise AnywidthError(
                f"group {group.name!r} is tied to {multiple} times {base!r}: give a width for "
                f"{base!r} instead"
            )
        if group.fixed is not None and fraction != 1.0:
            raise AnywidthError(
                f"group {group.name!r} is fixed ({group.fixed}), so it cannot run at {fraction}; "
                "leave it out"
            )

    def _in_order(self, config: ChannelConfig) -> ChannelConfig:
        """The configuration in the order of the network, if it has exactly its groups."""
        if tuple(config) == tuple(self.groups) or sorted(config) != sorted(self.groups):
            return config
        return ChannelConfig(tuple((name, config[name]) for name in self.groups))

    def check(self, config: ChannelConfig) -> None:
        """Raise an error unless `config` is a configuration of this network."""
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
            whole = isinstance(active, int) and not isinstance(active, bool)
            if not whole or not 1 <= active <= group.channels or active % group.unit:
                raise AnywidthError(
                    f"group {name!r} cannot run {active!r} channels: expected a multiple of "
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

    def fraction(self, config: ChannelConfig) -> float:
        """The share of the elastic channels that are active in a configuration.

        At both ends of the range it is the width itself.
        """
        if config in (self.widest, self.narrowest):
            return self.widths.high if config == self.widest else self.widths.low
        groups = self.elastic()
        return sum(config[group.name] for group in groups) / sum(g.channels for g in groups)

    def lattice(self, count: int | None = None) -> list[ChannelConfig]:
        """The distinct configurations of uniform widths, narrowest first.

        With `count`, so many of them, evenly spread, including both ends.
        """
        found = list(self._uniform())
        if count is None:
            return found
        if whole_number(count) is None or count < 2:
            raise AnywidthError(f"lattice of {count!r} widths: expected at least 2 (both ends)")
        if count >= len(found):
            return found
        last = len(found) - 1
        return [found[round(i * last / (count - 1))] for i in range(count)]

    def distinct_widths(self) -> list[float]:
        """One width per configuration of `lattice`, with as few decimals as possible."""
        ends = {self.narrowest: self.widths.low, self.widest: self.widths.high}
        return [
            ends[config] if config in ends else self._short_width(config, (low + high) / 2)
            for config, (low, high) in self._uniform().items()
        ]

    def _uniform(self) -> dict[ChannelConfig, tuple[float, float]]:
        """Each configuration of uniform widths, and widths near both ends of its interval."""
        low, high = self.widths.low, self.widths.high
        edges = {low, high}
        for group in self.elastic():
            size = group.channels
            for active in range(1, size + 1):
                # round_channels changes if channels + divisor/2 crosses a multiple, or by the
                # 90 % rule: at halves of channels or at active / 0.9.
                for edge in ((active - 0.5) / size, active / size, active / (0.9 * size)):
                    if low < edge < high:
                        edges.add(edge)
        ordered = sorted(edges)
        probes = ordered + [(a + b) / 2 for a, b in itertools.pairwise(ordered)]
        found: dict[ChannelConfig, tuple[float, float]] = {}
        for width in sorted(probes):
            config = self.resolve(width)
            found[config] = (found[config][0] if config in found else width, width)
        return found

    def _short_width(self, config: ChannelConfig, width: float) -> float:
        low, high = self.widths.low, self.widths.high
        rounded = (round(width, places) for places in range(2, 16))
        inside = (short for short in rounded if low <= short <= high)
        return next((short for short in inside if self.resolve(short) == config), width)

    def elastic(self) -> list[ChannelGroup]:
        """The groups whose size can be chosen, in the order of the network."""
        return [g for g in self.groups.values() if g.fixed is None and g.tied is None]

    # ---- sizes ------------------------------------------------------------------------------

    def axis_size(self, axis: Sequence[Segment], config: ChannelConfig) -> int:
        """The number of active entries of an axis."""
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

    def macs(self, config: ChannelConfig) -> int:
        """Multiply-adds of one example at a valid configuration."""
        units = self._units(config)
        return sum(term.macs(units) for term in self.costs)

    def _units(self, config: ChannelConfig) -> dict[str, int]:
        """The number of active units of each group."""
        return {name: active // self.groups[name].unit for name, active in config.items()}

    # ---- editing ----------------------------------------------------------------------------

    def group(self, name: str) -> ChannelGroup:
        if name not in self.groups:
            ordered = sorted(self.groups)
            near = ordered[max(0, bisect.bisect(ordered, str(name)) - 2) :][:4]
            raise AnywidthError(
                f"no group {name!r} in this plan; similar names are {near} (print(plan) lists all)"
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
        """Keep a group at its full size."""
        self._check_editable()
        self.groups[name] = replace(self.group(name), fixed=reason, tied=None)

    def tie(self, name: str, base: str, multiple: int) -> None:
        """Give a group always `multiple` times the channels of another group."""
        self._check_editable()
        group, other = self.group(name), self.group(base)
        if group.fixed is not None:
            raise AnywidthError(
                f"group {name!r} is fixed ({group.fixed}), so it cannot follow {base!r}; "
                f"tie {base!r} to it, or tie before pinning"
            )
        times = whole_number(multiple)
        if times is None:
            raise AnywidthError(
                f"tying {name!r} to {multiple!r} times {base!r}: expected a whole number"
            )
        if other.channels * times != group.channels:
            raise AnywidthError(
                f"group {name!r} has {group.channels} channels, which is not {multiple} times "
                f"the {other.channels} of {base!r}"
            )
        if other.unit * times % group.unit:
            raise AnywidthError(
                f"group {name!r} needs a multiple of {group.unit} channels, and {multiple} times "
                f"the channels of {base!r} is not always one"
            )
        if name in self._tied_chain(base):
            raise AnywidthError(f"tying {name!r} to {base!r} would tie it to itself")
        self.groups[name] = replace(group, tied=(base, times))

    def set_divisor(self, name: str, divisor: int) -> None:
        """Round one group to its own divisor instead of the width range's."""
        self._check_editable()
        checked = check_whole(divisor, 1, f"group {name!r}: divisor")
        self.groups[name] = replace(self.group(name), divisor=checked)

    def only(self, *roles: str) -> None:
        """Narrow only the groups that have these roles; all others keep their full size.

        The trace knows the role of a group from what makes and reads it:

        - `"mlp"`: channels inside a residual branch, such as an MLP's intermediate size. A network
          in which these alone narrow is a MatFormer;
        - `"heads"`: channels of attention, narrowed by whole heads;
        - `"hidden"`: channels of the residual itself.

        If channels have two roles because the network's code gives both one size, name both. Roles
        are known for networks with attention.

        Example:
            >>> plan = anywidth.plan(decoder, tokens)
            >>> plan.only("mlp")
        """
        self._check_editable()
        kept = groups_with_roles(self.groups, roles)
        for name in set(self.groups) - kept:
            if self.groups[name].fixed is None:
                self.pin(name, f"only {' and '.join(roles)} narrow")

    def copy(self) -> Plan:
        """A copy that can be edited, also if this is the plan of a converted network."""
        same = copy.deepcopy(self, {id(self.given): self.given})
        same._is_applied = False
        return same

    def _check_editable(self) -> None:
        # A network remembers the configurations of its widths.
        if self._is_applied:
            raise AnywidthError(
                "this plan belongs to a converted network, which would not follow an edit: edit a "
                "copy (anywidth.plan_of(model).copy()) and convert the network again with it"
            )

    def base_first(self) -> list[str]:
        """Group names, each after the group it is tied to."""
        return sorted(self.groups, key=lambda name: len(self._tied_chain(name)))

    # ---- reading and writing ----------------------------------------------------------------

    def elastic_share(self) -> float:
        """The share of the multiply-adds that belong to layers which can narrow."""
        whole, units = self.macs(self.full), self._units(self.full)
        elastic = sum(
            term.macs(units)
            for term in self.costs
            if any(self.can_narrow(group) for axis in term.axes for group, _ in axis)
        )
        return elastic / whole if whole else 0.0

    def held_back(self) -> list[HeldBack]:
        """What stays whole at the narrowest width but for outputs, by reason."""
        return held_back(self, self._units(self.full), self._units(self.narrowest))

    def elastic_layers(self) -> tuple[int, int]:
        """(layers whose whole output is elastic, all convolution and linear layers)."""

        def is_elastic(axis: Axis) -> bool:
            return axis is not None and all(self.can_narrow(s.group) for s in axis)

        return sum(is_elastic(axis) for axis in self.outputs.values()), len(self.outputs)

    def can_narrow(self, name: str) -> bool:
        """Whether a group, or the group it is tied to, is elastic."""
        return self.groups[self.root(name)].fixed is None

    def root(self, name: str) -> str:
        """The group at the end of the chain of ties; itself if it is not tied."""
        return self._tied_chain(name)[-1]

    def _tied_chain(self, name: str) -> list[str]:
        """A group, the one that it is tied to, the one that this is tied to, and so on."""
        tied = self.group(name).tied
        return [name, *self._tied_chain(tied[0])] if tied else [name]

    def to_json(self) -> dict[str, Any]:
        """Data for `json.dump`; `Plan.from_json` reads it."""
        return fields_to_json(vars(self))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """A plan from the data of `to_json`; raises if anything in it is damaged."""
        found = Plan(**fields_from_json(data))
        check_consistent(found)
        return found

    def __str__(self) -> str:
        return plan_to_text(self)
