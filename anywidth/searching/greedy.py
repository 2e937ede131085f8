"""Greedy slimming: from the widest network, take channels where they cost the least.

AutoSlim tries every layer before each step. Here a layer's last known price, the loss gained per
cost saved, is trusted until it is the lowest; then it is judged again. It gives nearly the same
path for a fraction of the passes.
"""

from __future__ import annotations

from collections.abc import Iterator

from anywidth.searching.choices import Choices, Cost
from anywidth.searching.judging import Judge
from anywidth.width import ChannelConfig

_FILLS = 3


def slim(choices: Choices, judge: Judge, target: float, share: float) -> Iterator[ChannelConfig]:
    """The configurations on the way from the widest one until the cost is at most `target`."""
    here = choices.widest
    yield here
    prices: dict[str, float] = {}
    while choices.cost(here) > target:
        moves = {
            name: move
            for name in choices.counts
            if (move := choices.narrower(here, name, share)) is not None
        }
        if not moves:
            return
        here = moves[_cheapest(here, moves, prices, judge, choices.cost)]
        yield here


def _cheapest(
    here: ChannelConfig,
    moves: dict[str, ChannelConfig],
    prices: dict[str, float],
    judge: Judge,
    cost: Cost,
) -> str:
    """The move with the lowest price; `prices` holds those known from earlier steps."""
    judged: set[str] = set()
    while True:
        unknown = [name for name in moves if name not in prices]
        names = unknown or [min(moves, key=lambda name: prices[name])]
        if names[0] in judged:
            return names[0]
        judge.judge_all([here, *(moves[name] for name in names)])
        for name in names:
            saved = cost(here) - cost(moves[name])
            prices[name] = (judge.score(moves[name]) - judge.score(here)) / saved
        judged.update(names)


def fill(choices: Choices, judge: Judge, config: ChannelConfig, target: float) -> ChannelConfig:
    """Spends what the last step of slimming has left of the budget, one group at a time."""
    for _ in range(_FILLS):
        wider = [choices.wider(config, name, target) for name in choices.counts]
        within = [one for one in wider if one is not None]
        judge.judge_all(within)
        best = min(within, key=judge.score, default=None)
        if best is None or judge.score(best) >= judge.score(config):
            break
        config = best
    return config
