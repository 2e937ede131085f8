"""Timing several networks fairly: they take turns, and the fastest passes count."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one pass, from many passes.

    Args:
        milliseconds: the mean of the fastest third; the number to report.
        fastest: the shortest pass.
        median: half of the passes were faster.
    """

    milliseconds: float
    fastest: float
    median: float

    @staticmethod
    def of(times: Sequence[float]) -> Timing:
        return Timing(mean_of_fastest(times), min(times), statistics.median(times))


def mean_of_fastest(times: Sequence[float]) -> float:
    """The mean of the fastest third: the time on a device that does nothing else."""
    best = sorted(times)[: max(1, len(times) // 3)]
    return statistics.fmean(best)


def time_in_turns(
    passes: Sequence[Callable[[], float]], advance: Callable[[], None], repeats: int
) -> list[list[float]]:
    """Milliseconds of each repeat, per network.

    Every network runs once before any runs again, so that a busy moment of the machine slows one
    pass of each and not all passes of one. A function in `passes` runs one pass of its network and
    returns its milliseconds; `advance` is called after each timed pass.
    """
    for one in passes:
        for _ in range(WARM_UP):
            one()
    times: list[list[float]] = [[] for _ in passes]
    for _ in range(repeats):
        for found, one in zip(times, passes, strict=True):
            found.append(one())
            advance()
    return times
