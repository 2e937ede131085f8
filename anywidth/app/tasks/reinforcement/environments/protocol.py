"""What every environment looks like to a learner: many games of one kind, stepped together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from anywidth.errors import AnywidthError
from anywidth.seeds import derive_seed

MOST_STEPS = 27_000
"""Agent steps after which a game is cut: 108,000 Atari frames, half an hour, as papers do."""


@dataclass(frozen=True)
class Outcome:
    """What one step of all environments brought. The arrays are not written to again.

    Args:
        observations: (count, *observation_shape), what to act on next: where a game was over, the
            first observation of the next one. Pixels are uint8, anything else float32.
        rewards: (count,) float32, not clipped.
        ends: (count,) bool: no reward after this step is due to what was done before it. True
            where a game was over or was cut, and when training on Atari also at a lost life.
        scores: the sums of rewards of the full games that were over, in the order of `finished`.
        finished: (count,) bool: which environments those were of.
    """

    observations: np.ndarray
    rewards: np.ndarray
    ends: np.ndarray
    scores: list[float]
    finished: np.ndarray


class VectorEnvironment(Protocol):
    """`count` games side by side; one that is over starts anew in the same step."""

    count: int
    actions: int
    observation_shape: tuple[int, ...]
    frames_per_second: int

    def reset(self) -> np.ndarray:
        """Starts all games from the seed, however often it is called; the first observations."""
        ...

    def step(self, actions: np.ndarray) -> Outcome:
        """One action for each environment, whole numbers from 0 to `actions` - 1."""
        ...

    def render(self) -> np.ndarray:
        """The first game's screen as (height, width, 3) RGB; for one made with `rendered=True`."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class SteppingAlone(VectorEnvironment, Protocol):
    """An environment that steps while the caller does something else: `step` in two halves."""

    def send(self, actions: np.ndarray) -> None:
        """Begins a step and returns at once."""
        ...

    def receive(self) -> Outcome:
        """Waits for the outcome of the step begun."""
        ...


class ScoreBook:
    """The true score of each environment's game so far."""

    def __init__(self, count: int) -> None:
        self._sums = np.zeros(count)

    def clear(self) -> None:
        self._sums[:] = 0

    def add(self, rewards: np.ndarray, finished: np.ndarray) -> list[float]:
        """Adds a step's rewards; the final scores of the games that it finished."""
        self._sums += rewards
        scores: list[float] = self._sums[finished].tolist()
        self._sums[finished] = 0
        return scores


def environment_seeds(seed: int, count: int) -> np.ndarray:
    """A seed for each environment, in the 31 bits that every package takes."""
    bits = 2**31 - 1
    return np.array([derive_seed("environment", seed, index) & bits for index in range(count)])


def checked_actions(actions: np.ndarray, count: int, choices: int) -> np.ndarray:
    """The actions as int64, or an error: native environments hang on one that does not exist."""
    given = np.asarray(actions)
    if given.shape != (count,) or given.dtype.kind not in "iu":
        raise AnywidthError(
            f"actions of shape {given.shape} and type {given.dtype}: expected whole numbers of "
            f"shape ({count},), one for each environment"
        )
    if given.min() < 0 or given.max() >= choices:
        raise AnywidthError(
            f"actions from {given.min()} to {given.max()}: expected 0 to {choices - 1}; give the "
            f"policy {choices} outputs"
        )
    return given.astype(np.int64)


def not_rendered() -> AnywidthError:
    return AnywidthError(
        "render() of an environment without a screen: make it with "
        "make_environment(..., rendered=True)"
    )
