"""What a plan leaves whole and what that costs at the narrowest width.

A share of elastic layers does not show it: a product of which one side stays whole shrinks with the
width, and a product of which both sides narrow shrinks with its square.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from anywidth.planning.parts import ChannelGroup, CostTerm
from anywidth.width import ChannelConfig

# Reasons that a user gave.
CHOSEN = ("pinned by the user", "only ")
# Reasons of what a network ends with, if nothing reads it.
ENDS = ("is an output", "reduced to an output", "is read outside", "entries of an embedding")
# More layers than these are counted, not named.
MOST_NAMES = 2


class HeldBack(NamedTuple):
    """Layers that stay whole for one reason; `share` of the multiply-adds would go otherwise."""

    reason: str
    layers: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        more = len(self.layers) - MOST_NAMES
        names = ", ".join(self.layers[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        return f"{self.share:.0%} {names}: {self.reason}"


def held_back(
    groups: Mapping[str, ChannelGroup],
    costs: Iterable[CostTerm],
    full: ChannelConfig,
    narrow: ChannelConfig,
    low: float,
) -> list[HeldBack]:
    """What stays whole at the narrowest width `low`, by reason, the most costly first.

    Not the outputs of the network, which nothing reads, nor what a user pinned.
    """
    stays = {g.name for g in groups.values() if _is_held(g)}
    whole = 0.0
    by_reason: dict[str, float] = {}
    for term in costs:
        whole += _macs(term, groups, full)
        own = (*term.whole, *(name for axis in term.axes for name, _ in axis))
        held = next((name for name in own if name in stays), None)
        if held is not None:
            reason = str(groups[held].fixed)
            freed = _macs(term, groups, narrow) * (1 - low)
            by_reason[reason] = by_reason.get(reason, 0.0) + freed
    found = []
    for reason, freed in sorted(by_reason.items(), key=lambda item: -item[1]):
        held_groups = [g for g in groups.values() if g.name in stays and g.fixed == reason]
        layers = dict.fromkeys(maker for group in held_groups for maker in group.makers)
        found.append(HeldBack(reason, tuple(layers), freed / whole if whole else 0.0))
    return found


def _is_held(group: ChannelGroup) -> bool:
    reason = group.fixed
    return reason is not None and not reason.startswith(CHOSEN if group.readers else CHOSEN + ENDS)


def _macs(term: CostTerm, groups: Mapping[str, ChannelGroup], config: ChannelConfig) -> float:
    product = float(term.factor)
    for axis in term.axes:
        product *= sum(config[name] // groups[name].unit * n for name, n in axis)
    return product
