"""The two ways to search: greedy slimming, and evolution from what it found.

Greedy slimming starts at the widest network and takes channels where they cost the least. AutoSlim
tries every layer before each step. Here a layer's last known price, the loss gained per
cost saved, is trusted until it is the lowest; then it is judged again. It gives nearly the same
path for a fraction of the passes. Evolution keeps the best configurations within a budget, changes
and crosses them, and repeats.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

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


# ---- evolution -----------------------------------------------------------------------------------


# Once-for-all's numbers: a quarter are parents, a gene changes one time in ten.
_PARENTS = 0.25
_RATE = 0.1
_TRIES = 10


def evolve(
    choices: Choices,
    judge: Judge,
    target: float,
    seeds: Sequence[ChannelConfig],
    population: int,
    generations: int,
    chance: random.Random,
) -> Iterator[ChannelConfig]:
    """Yields every configuration that is judged; the best of them is the answer."""
    known = list(dict.fromkeys(config for config in seeds if choices.cost(config) <= target))
    known += _children(choices, target, known, population - len(known), chance)
    judge.judge_all(known)
    yield from known
    for _ in range(generations):
        known.sort(key=judge.score)
        parents = known[: max(2, round(_PARENTS * population))]
        children = _children(choices, target, parents, population - len(parents), chance)
        judge.judge_all(children)
        yield from children
        known = parents + children


def _children(
    choices: Choices,
    target: float,
    parents: Sequence[ChannelConfig],
    number: int,
    chance: random.Random,
) -> list[ChannelConfig]:
    """New configurations that use the budget up: all mutated, half of them crossed too."""
    found: list[ChannelConfig] = []
    seen = set(parents)
    for _ in range(_TRIES * number):
        if len(found) >= number:
            break
        child = choices.mutated(chance.choice(parents), _RATE, chance)
        if chance.random() < 0.5:
            child = choices.crossed(child, chance.choice(parents), chance)
        child = choices.fitted(child, target, chance)
        if child not in seen:
            seen.add(child)
            found.append(child)
    return found
