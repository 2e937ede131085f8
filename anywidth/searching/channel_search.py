"""`search`: how many channels each group should have for a budget."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from anywidth.errors import AnywidthError
from anywidth.measuring.cost import latency
from anywidth.measuring.shown_progress import progress_if_possible
from anywidth.searching.budgets import Budget, Cost, check_reachable, cost_of, shown_cost
from anywidth.searching.choices import Choices
from anywidth.searching.evolution import evolve
from anywidth.searching.found import Found, Judged, SearchResult
from anywidth.searching.greedy import fill, slim
from anywidth.searching.judging import Evaluate, Judge
from anywidth.searching.latency_table import LatencyTable
from anywidth.seeds import derive_seed
from anywidth.slimming.state import state_of
from anywidth.width import ChannelConfig, is_number, whole_number

Method = Literal["greedy", "evolution"]
# Configurations per budget that are calibrated and judged exactly.
_FINALISTS = 4
# A finalist may be this much slower than foretold.
_LATE = 1.05
_TURNS = 3


def search(
    model: nn.Module,
    evaluate: Evaluate,
    budget: Budget | Sequence[Budget],
    *,
    calibration: Iterable[Any] | None = None,
    method: Method = "greedy",
    metric: str | None = None,
    latencies: LatencyTable | None = None,
    share: float = 0.1,
    population: int = 50,
    generations: int = 10,
    seed: int = 0,
    notes: str | Path | None = None,
    progress: bool = True,
) -> SearchResult:
    """Finds how many channels each group should have so that the network fits a budget.

    Nothing is trained. Configurations are compared by the statistics of each batch; the best few
    per budget are calibrated and judged exactly, beside the uniform width of the same cost. If no
    configuration is better than that width, the result is that width. Ctrl-C ends the search early
    and keeps what was found. The answers can be trusted as far as the network was trained for
    nonuniform widths (`Sampling(nonuniform=True)`).

    Args:
        model: a converted network; afterwards it is as it was, and the configurations found are
            calibrated.
        evaluate: is given the network, set to a configuration, in evaluation mode and without
            gradients; returns numbers by name. Use held-out training data, never test data.
        budget: one or several budgets of one kind.
        calibration: training batches for `anywidth.calibrate`; a network without batch norm needs
            none.
        method: `"greedy"` takes channels where the loss per cost saved is least; `"evolution"`
            starts from that and from uniform widths, and goes on with random changes.
        metric: the metric to search by; the first one if not given. Lower is better if it is
            called an error or a loss, else higher. A loss is smoother than an error and guides
            better.
        latencies: a table from `measure_latencies`, for budgets in milliseconds.
        share: how much of a group one greedy step takes.
        population: configurations per generation of evolution.
        generations: of evolution.
        seed: the same seed gives the same answer on a CPU.
        notes: a file that keeps all answers, so that a killed search goes on where it was.
        progress: show how far it has come and the best so far (if rich is installed).

    Example:
        >>> result = anywidth.search(model, evaluate, anywidth.Budget("macs", 150e6),
        ...                          calibration=loader)
        >>> small = anywidth.extract(model, result.found[0].best.channels)
    """
    budgets = _checked(budget, method, share, population, generations)
    plan = state_of(model).plan
    choices = Choices(plan)
    if not choices.counts:
        raise AnywidthError("search(): no group of this network can be narrowed; see print(plan)")
    cost = cost_of(budgets[0].kind, plan, latencies)
    for one in budgets:
        check_reachable(one, cost(choices.narrowest), cost(choices.widest))
    judge = Judge(model, evaluate, calibration, metric, None if notes is None else Path(notes))
    front: list[ChannelConfig] = []
    tried: dict[Budget, list[ChannelConfig]] = {one: [] for one in budgets}
    is_complete = False
    with (
        progress_if_possible("searching", shown=progress) as report,
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(judge),
    ):
        for config in slim(choices, judge, cost, min(one.amount for one in budgets), share):
            front.append(config)
            report(judge.passes, cost=shown_cost(budgets[0].kind, cost(config)),
                   **{judge.metric: judge.value(config)})  # fmt: skip
        for one in budgets:
            tried[one] = _refined(choices, judge, cost, one.amount, front)
            if method == "evolution":
                chance = random.Random(derive_seed("search", seed, int(one.amount)))
                seeds = [*tried[one], _uniform(choices, cost, one.amount)]
                for config in evolve(choices, judge, cost, one.amount, seeds, population,
                                     generations, chance):  # fmt: skip
                    tried[one].append(config)
                    best = min(tried[one], key=judge.score)
                    report(judge.passes, budget=str(one), **{judge.metric: judge.value(best)})
        is_complete = True
    found = tuple(_best(model, one, tried[one], choices, cost, judge) for one in budgets)
    judge.close()
    path = tuple(Judged(c, cost(c), {judge.metric: judge.value(c)}) for c in front)
    return SearchResult(judge.metric, budgets[0].kind, found, path, judge.passes, is_complete)


def _refined(
    choices: Choices, judge: Judge, cost: Cost, target: float, front: Sequence[ChannelConfig]
) -> list[ChannelConfig]:
    """The first configuration of the front within a budget, also with the budget used up."""
    within = next((config for config in front if cost(config) <= target), None)
    if within is None:
        return []
    return [fill(choices, judge, cost, within, target), within]


def _best(
    model: nn.Module,
    budget: Budget,
    tried: Sequence[ChannelConfig],
    choices: Choices,
    cost: Cost,
    judge: Judge,
) -> Found:
    """The best of the finalists and the uniform width, all judged exactly."""
    uniform = _uniform(choices, cost, budget.amount)
    ranked = sorted(dict.fromkeys(tried), key=judge.score)[:_FINALISTS]
    finalists = dict.fromkeys([uniform, *ranked])
    if budget.kind == "milliseconds":
        measured = _measured(model, list(finalists))
        most = max(budget.amount * _LATE, measured[uniform])
        finalists = {c: None for c in finalists if measured[c] <= most}
        cost = measured.__getitem__
    best = min(finalists, key=judge.exact_score)
    judge.prepare(best)
    return Found(
        budget,
        *(Judged(config, cost(config), judge.exact(config)) for config in (best, uniform)),
    )


def _measured(model: nn.Module, configs: Sequence[ChannelConfig]) -> dict[ChannelConfig, float]:
    """Milliseconds of the extracted networks; they take turns, and each one's fastest counts."""
    turns = [{c: latency(model, c, fold=True).fastest for c in configs} for _ in range(_TURNS)]
    return {config: min(turn[config] for turn in turns) for config in configs}


def _uniform(choices: Choices, cost: Cost, target: float) -> ChannelConfig:
    """The dearest uniform width within the budget."""
    within = [config for config in choices.plan.lattice() if cost(config) <= target]
    return max(within, key=cost, default=choices.narrowest)


def _checked(
    budget: Budget | Sequence[Budget], method: str, share: float, population: int, generations: int
) -> list[Budget]:
    budgets = [budget] if isinstance(budget, Budget) else list(budget)
    if not budgets or not all(isinstance(one, Budget) for one in budgets):
        raise AnywidthError(
            f"search(budget={budget!r}): expected a Budget or a list of them, such as "
            'anywidth.Budget("macs", 150e6)'
        )
    if len({one.kind for one in budgets}) > 1:
        kinds = sorted({one.kind for one in budgets})
        raise AnywidthError(f"search(): budgets of {kinds}; search for one kind at a time")
    if method not in get_args(Method):
        raise AnywidthError(f"search(method={method!r}): expected one of {get_args(Method)}")
    if not is_number(share) or not 0 < share <= 0.5:
        raise AnywidthError(f"search(share={share!r}): expected a number above 0, at most 0.5")
    for name, value, least in (("population", population, 4), ("generations", generations, 1)):
        if (whole_number(value) or 0) < least:
            raise AnywidthError(
                f"search({name}={value!r}): expected a whole number of at least {least}"
            )
    return list(dict.fromkeys(budgets))
