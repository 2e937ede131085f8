"""The configurations that a search chooses from, and the ways from one to another."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Mapping

from anywidth.planning.groups import Plan
from anywidth.planning.parts import ChannelGroup
from anywidth.width import ChannelConfig

Cost = Callable[[ChannelConfig], float]
# Counts that one step wider looks at.
_AHEAD = 8


class Choices:
    """Every elastic group with the channel counts that its width range and divisor allow.

    `cost` is what a configuration costs; its multiply-adds if not given.
    """

    def __init__(self, plan: Plan, cost: Cost | None = None) -> None:
        self.plan = plan
        self.cost = cost or plan.macs
        self.counts = {group.name: _counts(group, plan) for group in plan.elastic()}

    @property
    def widest(self) -> ChannelConfig:
        return self.config({name: counts[-1] for name, counts in self.counts.items()})

    @property
    def narrowest(self) -> ChannelConfig:
        return self.config({name: counts[0] for name, counts in self.counts.items()})

    def cheapest(self) -> ChannelConfig:
        """The configuration that costs least: the narrowest, unless a wider group is faster."""
        found = self.narrowest
        for name, counts in self.counts.items():
            found = min((self._with(found, name, one) for one in counts), key=self.cost)
        return found

    def config(self, counts: Mapping[str, int]) -> ChannelConfig:
        """The configuration with these counts; groups tied to others follow them."""
        channels = {name: group.channels for name, group in self.plan.groups.items()}
        for name in self.plan.base_first():
            tied = self.plan.groups[name].tied
            if tied is not None:
                channels[name] = channels[tied[0]] * tied[1]
            elif name in counts:
                channels[name] = counts[name]
        return ChannelConfig(channels)  # type: ignore[arg-type]

    def genes(self, config: ChannelConfig) -> dict[str, int]:
        """The counts of a configuration that may be chosen freely."""
        return {name: config[name] for name in self.counts}

    def narrower(self, config: ChannelConfig, name: str, share: float) -> ChannelConfig | None:
        """`config` with one group narrower by about `share` of its channels; None at its end.

        The latency may rise from one count to the next narrower one. So the step goes on until the
        cost is lower, and the answer is the widest network that costs no more than the step.
        """
        counts = self.counts[name]
        place = bisect.bisect_left(counts, config[name])
        if place == 0:
            return None
        wanted = config[name] - max(1, share * self.plan.groups[name].channels)
        lower = bisect.bisect_right(counts, math.ceil(wanted)) - 1
        first = min(max(lower, 0), place - 1)
        cost, here = self.cost, self.cost(config)
        for start in range(first, -1, -1):
            step = self._with(config, name, counts[start])
            most = cost(step)
            if most < here:
                wider = (self._with(config, name, one) for one in counts[place - 1 : start : -1])
                return next((one for one in wider if cost(one) <= most), step)
        return None

    def wider(self, config: ChannelConfig, name: str, target: float) -> ChannelConfig | None:
        """`config` with one group as wide as the target allows, a few counts wider at most."""
        counts = self.counts[name]
        place = bisect.bisect_right(counts, config[name])
        ahead = counts[place : place + _AHEAD]
        wider = (self._with(config, name, count) for count in reversed(ahead))
        return next((one for one in wider if self.cost(one) <= target), None)

    def mutated(self, config: ChannelConfig, rate: float, chance: random.Random) -> ChannelConfig:
        """A copy in which every group has a new count with probability `rate`, one at least."""
        genes = self.genes(config)
        changed = [name for name in genes if chance.random() < rate] or [chance.choice([*genes])]
        genes |= {name: chance.choice(self.counts[name]) for name in changed}
        return self.config(genes)

    def crossed(
        self, one: ChannelConfig, other: ChannelConfig, chance: random.Random
    ) -> ChannelConfig:
        """Every group's count from one of two configurations."""
        return self.config({name: chance.choice((one[name], other[name])) for name in self.counts})

    def fitted(self, config: ChannelConfig, target: float, chance: random.Random) -> ChannelConfig:
        """Random groups one step narrower until it fits, or wider as long as it fits.

        The cheapest configuration must fit.
        """
        names = list(self.counts)
        while self.cost(config) > target:
            tried = (self.narrower(config, name, 0.0) for name in chance.sample(names, len(names)))
            found = next((one for one in tried if one is not None), None)
            config = self.cheapest() if found is None else found
        for name in chance.sample(names, len(names)):
            while (one := self.wider(config, name, target)) is not None:
                config = one
        return config

    def _with(self, config: ChannelConfig, name: str, count: int) -> ChannelConfig:
        return self.config({**self.genes(config), name: count})


def _counts(group: ChannelGroup, plan: Plan) -> list[int]:
    """What the group can have from the narrowest to the widest width, in ascending order."""
    low, high = plan.widths.low * group.channels, plan.widths.high * group.channels
    inside = range(math.ceil(low), math.floor(high) + 1)
    return sorted({group.round(count, plan.widths.divisor) for count in (low, *inside, high)})
