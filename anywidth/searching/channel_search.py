"""`search`: how many channels each group should have for a budget."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from anywidth.distributed import stops_together
from anywidth.errors import AnywidthError
from anywidth.measuring.shown_progress import progress_if_possible
from anywidth.searching.budgets import Budget, check_reachable, cost_of, shown_cost
from anywidth.searching.choices import Choices
from anywidth.searching.finalists import Finalists, spread_uniform, uniform_within
from anywidth.searching.found import Judged, SearchResult
from anywidth.searching.judging import Evaluate, Judge
from anywidth.searching.latency_table import LatencyTable
from anywidth.searching.ways import evolve, fill, slim
from anywidth.slimming.state import state_of
from anywidth.training.seeds import derive_seed
from anywidth.width import ChannelConfig, check_whole, is_number

Method = Literal["greedy", "evolution"]


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
        latencies: a table from `measure_latencies`, for budgets in milliseconds. With a table of
            another device, finalists are not timed, and the table's predictions count.
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
    cost = cost_of(budgets[0].kind, plan, latencies)
    choices = Choices(plan, cost)
    if not choices.counts:
        raise AnywidthError("search(): no group of this network can be narrowed; see print(plan)")
    cheapest = choices.narrowest if latencies is None else choices.cheapest()
    for one in budgets:
        check_reachable(one, cost(cheapest), cost(choices.widest))
    notes = None if notes is None else Path(notes)
    tried: dict[Budget, list[ChannelConfig]] = {one: [] for one in budgets}
    front: list[ChannelConfig] = []
    uniform: list[ChannelConfig] = []
    is_complete = False
    with stops_together() as is_stopped:
        judge = Judge(model, evaluate, calibration, metric, notes, is_stopped)
        with (
            progress_if_possible("searching", shown=progress) as report,
            contextlib.suppress(KeyboardInterrupt),
            contextlib.closing(judge),
        ):
            for config in slim(choices, judge, min(one.amount for one in budgets), share):
                front.append(config)
                told = {"cost": shown_cost(budgets[0].kind, cost(config)), **judge.shown(config)}
                report(judge.passes, **told)
            spread = spread_uniform(plan, cost, cost(front[-1]))
            judge.judge_all(spread)
            uniform = spread
            for one in budgets:
                tried[one] = _refined(choices, judge, one.amount, front)
                if method == "evolution":
                    chance = random.Random(derive_seed("search", seed, int(one.amount)))
                    seeds = [*tried[one], uniform_within(plan, cost, one.amount)]
                    for config in evolve(choices, judge, one.amount, seeds, population,
                                         generations, chance):  # fmt: skip
                        tried[one].append(config)
                        best = min(tried[one], key=judge.score)
                        report(judge.passes, budget=str(one), **judge.shown(best))
            is_complete = True
        finalists = Finalists(judge, cost, latencies)
        known = {budget: [*some, *front] for budget, some in tried.items()}
        try:
            found = finalists.best(known)
        except KeyboardInterrupt:  # little is left to do, and it is the answer
            is_complete = False
            found = finalists.best(known)
        judge.close()
        path, spectrum = (
            tuple(Judged(c, cost(c), judge.shown(c)) for c in configs)
            for configs in (front, uniform)
        )
        return SearchResult(
            judge.metric, budgets[0].kind, found, path, spectrum, judge.passes, is_complete,
            finalists.load,
        )  # fmt: skip


def _refined(
    choices: Choices, judge: Judge, target: float, front: Sequence[ChannelConfig]
) -> list[ChannelConfig]:
    """The first configuration of the front within a budget, also with the budget used up.

    If a latency stops the front above the budget, because a wider group is faster, it is the
    cheapest configuration.
    """
    fitting = (config for config in front if choices.cost(config) <= target)
    within = next(fitting, choices.cheapest())
    return [fill(choices, judge, within, target), within]


def _checked(
    budget: Budget | Sequence[Budget], method: str, share: float, population: int, generations: int
) -> list[Budget]:
    budgets = [budget] if isinstance(budget, Budget) else list(budget)
    if not budgets or not all(isinstance(one, Budget) for one in budgets):
        raise AnywidthError(
            f"search(budget={budget!r}): expected a Budget or a list of them, such as "
            'anywidth.Budget("macs", 150e6)'
        )
    if len(kinds := sorted({one.kind for one in budgets})) > 1:
        raise AnywidthError(f"search(): budgets of {kinds}; search for one kind at a time")
    if method not in get_args(Method):
        raise AnywidthError(f"search(method={method!r}): expected one of {get_args(Method)}")
    if not is_number(share) or not 0 < share <= 0.5:
        raise AnywidthError(f"search(share={share!r}): expected a number above 0, at most 0.5")
    check_whole(population, 4, "search(): population")
    check_whole(generations, 1, "search(): generations")
    return list(dict.fromkeys(budgets))
