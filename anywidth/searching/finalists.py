"""The finalists of a search: measured if time counts, judged exactly, beside the uniform width."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anywidth.distributed import gathered, rank
from anywidth.planning.groups import Plan
from anywidth.searching.budgets import Budget
from anywidth.searching.choices import Cost
from anywidth.searching.found import Found, Judged
from anywidth.searching.judging import Judge
from anywidth.searching.latency_table import LatencyTable, measured_finalists
from anywidth.slimming.state import state_of
from anywidth.width import ChannelConfig

# Configurations per budget that are calibrated and judged exactly.
_FINALISTS = 4
# A prediction may be off: the best for several shares of the budget are measured.
_SHARES = (1.05, 1.0, 0.95, 0.9, 0.85)
# A finalist may be this much slower than the budget.
_LATE = 1.02
# Uniform widths that are judged beside the front.
_UNIFORM = 9


@dataclass
class Finalists:
    """Chooses the answer for each budget.

    `latencies` is the table that predicts the cost, if that is a time. Afterwards `load` is how
    many times as long networks took as when the table was measured.
    """

    judge: Judge
    cost: Cost
    latencies: LatencyTable | None
    load: float = 1.0

    def best(self, known: Mapping[Budget, Sequence[ChannelConfig]]) -> tuple[Found, ...]:
        """Per budget, the best of the finalists and the uniform width, all judged exactly.

        Finalists are chosen from `known` configurations, judged by batch statistics.
        """
        plan = state_of(self.judge.model).plan
        uniform = {one: uniform_within(plan, self.cost, one.amount) for one in known}
        chosen = {one: [uniform[one], *self._chosen(one, known[one])] for one in known}
        anchors = list(dict.fromkeys([plan.narrowest, plan.widest, *uniform.values()]))
        measured = self._measured(list(chosen.values()), anchors)
        costs = self.cost if measured is None else measured.__getitem__
        answers = []
        for budget, finalists in chosen.items():
            reference = uniform[budget]
            most = budget.amount * (1.0 if measured is None else _LATE)
            if self.cost(reference) <= budget.amount:
                most = max(most, costs(reference))
            within = [one for one in finalists if costs(one) <= most]
            finalists = within or [min(finalists, key=costs)]
            self.judge.judge_all(finalists, "exact")
            best = min(finalists, key=lambda one: self.judge.score(one, "exact"))
            self.judge.prepare(best)
            both = (best, reference)
            found = [Judged(one, costs(one), self.judge.metrics(one, "exact")) for one in both]
            answers.append(Found(budget, found[0], found[1], measured is not None))
        return tuple(answers)

    def _chosen(self, budget: Budget, known: Sequence[ChannelConfig]) -> list[ChannelConfig]:
        def within(share: float) -> list[ChannelConfig]:
            fitting = [one for one in known if self.cost(one) <= share * budget.amount]
            return sorted(dict.fromkeys(fitting), key=self.judge.score)

        if self.latencies is None or not self.latencies.is_of(self.judge.model):
            return within(1.0)[:_FINALISTS]
        return [one for share in _SHARES for one in within(share)[:1]]

    def _measured(
        self, finalists: Sequence[Sequence[ChannelConfig]], anchors: Sequence[ChannelConfig]
    ) -> dict[ChannelConfig, float] | None:
        """Milliseconds, measured on the first rank; None without a table of this device.

        The device may be more or less busy than when the table was measured. So these times are
        converted to those of the table, by `anchors` that the table's errors did not choose.
        """
        if self.latencies is None:
            return None
        found = None
        if rank() == 0:
            all_of_them = dict.fromkeys([*anchors, *itertools.chain.from_iterable(finalists)])
            found = measured_finalists(self.judge.model, list(all_of_them), self.latencies)
        found = gathered(found)[0]
        if found is None:
            return None
        before, now = [self.cost(one) for one in anchors], [found[one] for one in anchors]
        self.load = sum(now) / sum(before)
        slope, start = statistics.linear_regression(now, before)
        if slope <= 0 or start + slope * min(found.values()) <= 0:  # nothing but noise
            slope, start = 1 / self.load, 0.0
        return {config: start + slope * spent for config, spent in found.items()}


def fast_uniform(plan: Plan, cost: Cost) -> list[ChannelConfig]:
    """The uniform widths of which every wider one costs more, narrowest first.

    By multiply-adds and parameters these are all. By latency they are those whose numbers of
    channels suit the kernels.
    """
    found: list[ChannelConfig] = []
    least = math.inf
    for config in reversed(plan.lattice()):
        if cost(config) < least:
            least = cost(config)
            found.append(config)
    return found[::-1]


def uniform_within(plan: Plan, cost: Cost, target: float) -> ChannelConfig:
    """The widest uniform width within the budget, or the cheapest."""
    widths = fast_uniform(plan, cost)
    return next((one for one in reversed(widths) if cost(one) <= target), widths[0])


def spread_uniform(plan: Plan, cost: Cost, least: float) -> list[ChannelConfig]:
    """Some uniform widths from the cost of the front's last configuration to the widest."""
    known = [config for config in fast_uniform(plan, cost) if cost(config) >= least]
    last = len(known) - 1
    places = {round(i * last / (_UNIFORM - 1)) for i in range(_UNIFORM)} if known else set()
    return [known[place] for place in sorted(places)]
