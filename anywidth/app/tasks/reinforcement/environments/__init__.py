"""Games: Atari, MinAtar and gymnasium, with one interface: many of one kind, stepped together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from anywidth.errors import AnywidthError, packages_for
from anywidth.training.seeds import derive_seed

FORMS = "atari:breakout (or BreakoutNoFrameskip-v4), minatar:breakout or gym:CartPole-v1"
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

    frames_per_second: int

    def __init__(
        self, count: int, seed: int, actions: int, observation_shape: tuple[int, ...]
    ) -> None:
        self.count = count
        self.actions = actions
        self.observation_shape = observation_shape
        self._seeds = environment_seeds(seed, count)
        self._scores = np.zeros(count)  # true scores of the current games

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

    def _scores_of(self, rewards: np.ndarray, finished: np.ndarray) -> list[float]:
        """Add the rewards of a step; return the final scores of games that it finished."""
        self._scores += rewards
        scores: list[float] = self._scores[finished].tolist()
        self._scores[finished] = 0
        return scores

    def close(self) -> None:  # noqa: B027 - not every environment has something to close
        """Free what the games hold."""


def environment_seeds(seed: int, count: int) -> np.ndarray:
    """One seed per environment, in 31 bits, which every package accepts."""
    bits = 2**31 - 1
    return np.array([derive_seed("environment", seed, index) & bits for index in range(count)])


def make_environment(
    name: str,
    count: int,
    seed: int,
    *,
    training: bool = True,
    threads: int | None = None,
    most_steps: int | None = None,
    rendered: bool = False,
) -> VectorEnvironment:
    """Make `count` environments that step together; `seed` determines everything random.

    Args:
        name: "atari:breakout" or any other game of ale-py (BreakoutNoFrameskip-v4 means the same),
            "minatar:breakout" or another of MinAtar's five games, or "gym:" and the name of a
            gymnasium environment with numbered actions.
        training: in Atari, a lost life counts as an end, which speeds up learning.
        threads: threads for Atari; if not given, one per environment or core.
        most_steps: a game is cut off after this number of steps; if not given, after `MOST_STEPS`,
            or gymnasium's limit for the environment.
        rendered: keep the screen of the first game for `render`.

    Example:
        >>> games = make_environment("minatar:breakout", count=8, seed=0)
        >>> observations = games.reset()
        >>> outcome = games.step(np.zeros(8, np.int64))
    """
    family, colon, game = name.partition(":")
    if not colon and name.endswith("NoFrameskip-v4"):
        family, game = "atari", name
    with packages_for(name, "'anywidth[rl]'"):
        if family == "atari" and game:
            from anywidth.app.tasks.reinforcement.environments.atari import AtariEnvironment

            return AtariEnvironment(
                game,
                count,
                seed,
                training=training,
                threads=threads,
                most_steps=most_steps or MOST_STEPS,
                rendered=rendered,
            )
        if family == "minatar" and game:
            from anywidth.app.tasks.reinforcement.environments.minatar import MinAtarEnvironment

            return MinAtarEnvironment(game, count, seed, most_steps=most_steps or MOST_STEPS)
        if family == "gym" and game:
            from anywidth.app.tasks.reinforcement.environments.gym_vector import GymEnvironment

            return GymEnvironment(game, count, seed, most_steps=most_steps, rendered=rendered)
    raise AnywidthError(f"no environment {name!r}: expected something like {FORMS}")
