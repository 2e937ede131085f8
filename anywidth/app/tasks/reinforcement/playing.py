"""Play full games with a trained policy: scores and recordings."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anywidth.app.tasks.reinforcement.command import MOST_RECORDED
from anywidth.app.tasks.reinforcement.environments import make_environment
from anywidth.app.tasks.reinforcement.environments.recording import Recording
from anywidth.errors import AnywidthError
from anywidth.training.seeds import derive_seed

Policy = Callable[[Tensor], Any]
"""Observations → logits, or a tuple that starts with logits, as a network returns."""


@dataclass(frozen=True)
class GameScores:
    """True scores of full games, environment by environment."""

    scores: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; 0 for a single game."""
        if len(self.scores) < 2:
            return 0.0
        return statistics.stdev(self.scores) / math.sqrt(len(self.scores))


def play_games(
    policy: Policy,
    environment_name: str,
    games: int,
    seed: int,
    *,
    greedy: bool,
    count: int = 16,
    most_steps: int | None = None,
    threads: int | None = None,
) -> GameScores:
    """Play `games` full games and return their true scores.

    The number of games per environment is fixed in advance. Taking the first games that end would
    favour short games, which are the bad ones.

    Args:
        policy: the network, set to a width.
        seed: of the games and of the drawn actions; equal seeds give equal games.
        greedy: always take the likeliest action instead of drawing one by its probability.
        count: largest number of environments side by side.
        most_steps: as in `make_environment`; a greedy policy that does not start the ball waits
            until then.

    Example:
        >>> with anywidth.at_width(model, 0.25):
        ...     scores = play_games(model, "minatar:breakout", 30, seed=0, greedy=False)
        >>> print(f"{scores.mean:.1f} ± {scores.standard_error:.1f}")
    """
    count = min(count, games)
    due = [games // count + (index < games % count) for index in range(count)]
    scores: list[list[float]] = [[] for _ in range(count)]
    environment = make_environment(
        environment_name, count, seed, training=False, threads=threads, most_steps=most_steps
    )
    with contextlib.closing(environment):
        act = Actor(policy, environment.actions, seed, greedy)
        observations = environment.reset()
        while any(len(own) < wanted for own, wanted in zip(scores, due, strict=True)):
            outcome = environment.step(act(observations))
            observations = outcome.observations
            players = np.flatnonzero(outcome.finished)
            for player, score in zip(players, outcome.scores, strict=True):
                if len(scores[player]) < due[player]:
                    scores[player].append(score)
    return GameScores(tuple(score for own in scores for score in own))


def record_game(
    policy: Policy,
    environment_name: str,
    seed: int,
    *,
    greedy: bool,
    most_steps: int = MOST_RECORDED,
) -> Recording:
    """Play one game and keep the screen of every step, in colour; a longer game is cut off."""
    environment = make_environment(
        environment_name, 1, seed, training=False, most_steps=most_steps, rendered=True
    )
    with contextlib.closing(environment):
        act = Actor(policy, environment.actions, seed, greedy)
        observations = environment.reset()
        frames = []
        while True:
            frames.append(environment.render())
            outcome = environment.step(act(observations))
            observations = outcome.observations
            if outcome.finished[0]:
                return Recording(frames, outcome.scores[0], environment.frames_per_second)


class Actor:
    """Turns observations into actions; its draws depend only on its seed."""

    def __init__(self, policy: Policy, actions: int, seed: int, greedy: bool) -> None:
        parameters = policy.parameters() if isinstance(policy, nn.Module) else iter(())
        self._policy = policy
        self._actions = actions
        self._greedy = greedy
        self._device = next((p.device for p in parameters), torch.device("cpu"))
        self._chance = np.random.default_rng(derive_seed("playing", seed))

    @torch.no_grad()
    def __call__(self, observations: np.ndarray) -> np.ndarray:
        output = self._policy(torch.from_numpy(observations).to(self._device))
        logits: Tensor = output[0] if isinstance(output, tuple) else output
        if logits.shape != (len(observations), self._actions):
            raise AnywidthError(
                f"the policy returned logits of shape {tuple(logits.shape)}: expected "
                f"{(len(observations), self._actions)}: {self._actions} actions for each of "
                f"{len(observations)} environments"
            )
        preferences = logits.double().cpu().numpy()
        if np.isnan(preferences).any():
            raise AnywidthError("the policy returned NaN: it diverged; load an earlier checkpoint")
        if not self._greedy:
            # The argmax of logits plus Gumbel noise is a draw by their probabilities.
            preferences = preferences + self._chance.gumbel(size=preferences.shape)
        chosen: np.ndarray = preferences.argmax(1)
        return chosen
