"""Evolution: keep the best configurations within a budget, change and cross them, repeat."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from anywidth.searching.choices import Choices
from anywidth.searching.judging import Judge
from anywidth.width import ChannelConfig

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
