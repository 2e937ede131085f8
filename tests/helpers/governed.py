"""Widths to choose from, and a worker in virtual time, for tests of governors."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from anywidth_runtime.governor import Policy
from anywidth_runtime.governor_menu import Choice
from anywidth_runtime.governor_queue import DeadlineQueue, Waiting

_PUBLISHED = Path(__file__).parents[1] / "reference" / "us_mobilenet_v1_imagenet.csv"
_MS_PER_GIGA = 20.0


def published_choices() -> list[Choice]:
    """US-MobileNet v1 at its published widths; time in proportion to multiply-adds."""
    with _PUBLISHED.open() as file:
        return [
            Choice(
                float(row["width"]),
                _MS_PER_GIGA * float(row["macs"]) / 1e9,
                100 - float(row["published_top1_error"]),
            )
            for row in csv.DictReader(file)
        ]


class Outcome(NamedTuple):
    in_time: float
    accuracy: float
    widths: list[float]


def replay(
    arrivals: Sequence[float],
    policy: Policy,
    choices: Sequence[Choice],
    *,
    objective_ms: float = 36.0,
    slower: float = 1.0,
) -> Outcome:
    """One worker that takes exactly `slower` times what the choices say."""
    table = {one.width: one for one in choices}
    queue, now, answered, accuracy = DeadlineQueue(), 0.0, 0, 0.0
    widths: list[float] = []
    coming = iter(arrivals)
    following = next(coming, None)
    while following is not None or queue:
        if not queue:
            assert following is not None
            now = max(now, following)
        while following is not None and following <= now:
            queue.push(Waiting(following + objective_ms / 1000))
            policy.arrived(queue[-1], following)
            following = next(coming, None)
        while queue and queue[0].deadline < now + policy.shortest(queue[0]):
            queue.take()
        if not queue:
            continue
        decision = policy.decide(queue, now)
        taken = queue.take(decision.batch)
        chosen = table[decision.width]
        seconds = slower * len(taken) * chosen.milliseconds / 1000
        now += seconds
        policy.note(decision.width, seconds, size=len(taken))
        assert chosen.accuracy is not None
        for request in taken:
            widths.append(float(chosen.width))
            if now <= request.deadline:
                answered += 1
                accuracy += chosen.accuracy
    return Outcome(answered / len(arrivals), accuracy / max(answered, 1), widths)


def gamma_arrivals(count: int, rate: float, squared_variation: float) -> list[float]:
    """Requests whose gaps have this squared coefficient of variation: 1 is Poisson."""
    draw = np.random.default_rng(0)
    gaps = draw.gamma(1 / squared_variation, squared_variation / rate, count)
    return np.cumsum(gaps).tolist()
