"""What a plan leaves whole and what that costs at the narrowest width.

A share of elastic layers does not show it: a product of which one side stays whole shrinks with the
width, and a product of which both sides narrow shrinks with its square.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from anywidth.planning.parts import ChannelGroup

if TYPE_CHECKING:
    from anywidth.planning.groups import Plan

# Reasons that a user gave.
CHOSEN = ("pinned by the user", "only ")
# Reasons of what a network ends with, if nothing reads it.
ENDS = ("is an output", "reduced to an output", "is read outside", "entries of an embedding")
# More layers than these are counted, not named.
MOST_NAMES = 2


class HeldBack(NamedTuple):
    """Layers that stay whole for one reason, such as that of the first of them.

    `share` of the network's multiply-adds would go if they narrowed.
    """

    reason: str
    layers: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        more = len(self.layers) - MOST_NAMES
        names = ", ".join(self.layers[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        return f"{self.share:.0%} {names}: {self.reason}"


def held_back(plan: Plan, full: Mapping[str, int], narrow: Mapping[str, int]) -> list[HeldBack]:
    """What stays whole at the narrowest width, by reason, the most costly first.

    `full` and `narrow` are the numbers of active units at full and at that width.
    Not the outputs of the network, which nothing reads, nor what a user pinned.
    """
    stays = {g.name: _kind(str(g.fixed)) for g in plan.groups.values() if _is_held(g)}
    whole = 0
    freed: dict[str, float] = {}
    for term in plan.costs:
        whole += term.macs(full)
        own = (*term.whole, *(name for axis in term.axes for name, _ in axis))
        kind = next((stays[name] for name in own if name in stays), None)
        if kind is not None:
            freed[kind] = freed.get(kind, 0.0) + term.macs(narrow) * (1 - plan.widths.low)
    found = []
    for kind, macs in sorted(freed.items(), key=lambda item: -item[1]):
        alike = [g for g in plan.groups.values() if stays.get(g.name) == kind]
        layers = tuple(dict.fromkeys(maker for group in alike for maker in group.makers))
        found.append(HeldBack(str(alike[0].fixed), layers, macs / whole if whole else 0.0))
    return found


def _kind(reason: str) -> str:
    """A reason without the numbers of layers: blocks that are built alike have one."""
    return re.sub(r"\d+", "#", reason)


def _is_held(group: ChannelGroup) -> bool:
    reason = group.fixed
    return reason is not None and not reason.startswith(CHOSEN if group.readers else CHOSEN + ENDS)
