"""Probes: configurations that are timed so that the latency of all others can be predicted."""

from __future__ import annotations

import hashlib
import json
import random
import re

from anywidth.errors import AnywidthError
from anywidth.planning.groups import Plan
from anywidth.searching.choices import Choices
from anywidth.width import ChannelConfig

PROBES = 24
"""How many are timed unless told."""
_SEED = 0
_TRIES = 20
# Counted up if other probes are drawn: times of earlier ones then belong to no network.
_DRAW = 2
# Kernels may be faster at multiples of one of these.
_MULTIPLES = (4, 8, 16)


def probe_configs(plan: Plan, count: int = PROBES) -> list[ChannelConfig]:
    """The first `count` probes of a network, always the same; fewer if it has no more.

    The two ends come first. Then in turn: a uniform width, a width per group, every group at one
    of its ends because searched configurations are as uneven as that, and multiples of a number.
    """
    chance = random.Random(_SEED)
    low, high = plan.widths.low, plan.widths.high
    choices = Choices(plan)

    def drawn(turn: int) -> ChannelConfig:
        if turn % 4 == 0:
            return plan.resolve(chance.uniform(low, high))
        if turn % 4 == 1:
            return plan.resolve({name: chance.uniform(low, high) for name in choices.counts})
        if turn % 4 == 2:
            return plan.resolve({name: chance.choice((low, high)) for name in choices.counts})
        multiple = chance.choice(_MULTIPLES)
        counts = {
            name: [one for one in some if one % multiple == 0] or some
            for name, some in choices.counts.items()
        }
        return choices.config({name: chance.choice(some) for name, some in counts.items()})

    found = dict.fromkeys([plan.widest, plan.narrowest])
    for turn in range(_TRIES * count):
        if len(found) >= count:
            break
        found[drawn(turn)] = None
    return list(found)[:count]


def network_key(plan: Plan) -> str:
    """Tells networks apart whose latencies may differ: their shapes, their widths, their input."""
    shapes = {name: list(shape) for name, shape in plan.shapes.items()}
    widths = [plan.widths.low, plan.widths.high, plan.widths.divisor]
    example = [str(one) for one in plan.example]
    text = json.dumps([_DRAW, shapes, widths, example], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def probe_name(plan: Plan, number: int) -> str:
    """What a file of probes calls one of them; times by these names tell their network."""
    return f"probe {number} of {network_key(plan)}"


def probe_number(name: object) -> tuple[int, str]:
    """The number of a probe and the key of its network."""
    found = re.fullmatch(r"probe (\d{1,9}) of (\w+)", str(name))
    if found is None:
        raise AnywidthError(f"{name!r} is not a probe")
    return int(found[1]), found[2]
