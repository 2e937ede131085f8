"""The interface of environments: many games of one kind, stepped together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from anywidth.training.seeds import derive_seed

MOST_STEPS = 27_000
"""Agent steps after which a game is cut off: 108,000 Atari frames, as in papers."""


@dataclass(frozen=True)
class Outcome:
    """The results of one step of all environments. The arrays are never overwritten.

    Args:
        observations: (count, *observation_shape), the next observations; after the end of a game,
            the first observation of the next game. Pixels are uint8, others float32.
        rewards: (count,) float32, not clipped.
        ends: (count,) bool: whether later rewards are independent of earlier actions. True if a
            game is over or was cut off, and in Atari training also at a lost life.
        scores: the sums of rewards of the finished games, in the order of `finished`.
        finished: (count,) bool: the environments of these games.
    """

    observations: np.ndarray
    rewards: np.ndarray
    ends: np.ndarray
    scores: list[float]
    finished: np.ndarray


class VectorEnvironment(ABC):
    """`count` games side by side; a game that is over starts again in the same step."""

    count: int
    actions: int
    observation_shape: tuple[int, ...]
    frames_per_second: int

    @abstractmethod
    def reset(self) -> np.ndarray:
        """Start all games from the seed and return the first observations."""

    @abstractmethod
    def step(self, actions: np.ndarray) -> Outcome:
        """Take one action per environment: integers from 0 to `actions` - 1, unchecked."""

    def send(self, actions: np.ndarray) -> None:
        """The first half of a step; an environment that can steps in the background after it."""
        self._sent = actions

    def receive(self) -> Outcome:
        """The second half: wait for the outcome of the step."""
        return self.step(self._sent)

    @abstractmethod
    def render(self) -> np.ndarray:
        """The screen of the first game as (height, width, 3) RGB; needs `rendered=True`."""

    def close(self) -> None:  # noqa: B027 - not every environment has something to close
        """Free what the games hold."""


class ScoreBook:
    """The true scores of the current games."""

    def __init__(self, count: int) -> None:
        self._sums = np.zeros(count)

    def clear(self) -> None:
        self._sums[:] = 0

    def add(self, rewards: np.ndarray, finished: np.ndarray) -> list[float]:
        """Add the rewards of a step; return the final scores of games that it finished."""
        self._sums += rewards
        scores: list[float] = self._sums[finished].tolist()
        self._sums[finished] = 0
        return scores


def environment_seeds(seed: int, count: int) -> np.ndarray:
    """One seed per environment, in 31 bits, which every package accepts."""
    bits = 2**31 - 1
    return np.array([derive_seed("environment", seed, index) & bits for index in range(count)])
