"""A finished policy: its network, which plays, and how it is judged and deployed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from anywidth.app.runs.run import Run
from anywidth.app.tasks.reinforcement.environments import make_environment
from anywidth.app.tasks.reinforcement.playing import GameScores, play_games
from anywidth.app.tasks.reinforcement.policies import build_model
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings
from anywidth.app.tasks.trained import Example, Judging, Trained
from anywidth.json_values import listed, whole
from anywidth.measuring.spectra import STANDARD_ERROR, Metric
from anywidth.training.seeds import derive_seed
from anywidth.translating.deployment import Deployment

_STATE = {"actions": whole(1, 2**16), "observation_shape": listed(whole(1, 2**14))}
MOST_SITUATIONS = 6
_STEPS_BETWEEN = 8


def play(
    model: nn.Module, settings: ReinforcementSettings, games: int, seed: int, *, greedy: bool
) -> GameScores:
    """Play full games at the current width."""
    return play_games(
        model,
        settings.environment,
        games,
        seed,
        greedy=greedy,
        most_steps=settings.longest_game,
        threads=settings.threads,
    )


@dataclass(frozen=True)
class TrainedPolicy(Trained):
    """A finished run with its trained network."""

    settings: ReinforcementSettings

    metrics: ClassVar[Mapping[str, Metric]] = {
        "score": Metric("mean score", 2),
        "greedy_score": Metric("mean score, greedy", 2),
    }
    drawn: ClassVar[tuple[str, ...]] = ("score", "greedy_score")
    curves: ClassVar[Mapping[str, str]] = {
        "policy_loss": "policy loss",
        "value_loss": "value loss",
        "training_score": "training score",
        "score": "mean score",
    }

    @staticmethod
    def network(run: Run, settings: ReinforcementSettings) -> nn.Module:
        state = run.read_state(_STATE)
        return build_model(settings, state["actions"], tuple(state["observation_shape"]))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean scores of full games, sampled and greedy; the same games at every width."""
        seed = derive_seed("evaluation", self.settings.seed)
        sampled = self._scores(model, "score", seed, greedy=False)
        return sampled | self._scores(model, "greedy_score", seed, greedy=True)

    def _scores(self, model: nn.Module, name: str, seed: int, *, greedy: bool) -> dict[str, float]:
        games = play(model, self.settings, self.settings.evaluation_games, seed, greedy=greedy)
        return {name: games.mean, name + STANDARD_ERROR: games.standard_error}

    @property
    def measured_on(self) -> str:
        return f"{self.settings.evaluation_games} games of {self.settings.environment}"

    def judging(self, seed: int = 0) -> Judging:
        """By the mean score of games that are played neither in training nor in `evaluate`."""
        start = derive_seed("judging", self.settings.seed, seed)
        score = partial(self._scores, name="score", seed=start, greedy=False)
        games = f"{self.settings.evaluation_games:,} games, the same for every configuration"
        return Judging(score, "score", games, is_held_out=True)

    def deployment(self) -> Deployment:
        environment = make_environment(self.settings.environment, 1, seed=0)
        with contextlib.closing(environment):
            seen = torch.from_numpy(environment.reset())
        return Deployment(
            (seen.repeat(2, *[1] * (seen.ndim - 1)),),
            ("observations",),
            ("logits", "values"),
            ({0: "batch"},),
            takes="observations as the environment gives them",
            facts={"environment": self.settings.environment},
            task=self.settings.task,
        )

    def examples(self) -> list[Example]:
        """Observations from a random game."""
        environment = make_environment(
            self.settings.environment, 1, seed=0, training=False, rendered=True
        )
        draw = np.random.default_rng(0)
        found = []
        with contextlib.closing(environment):
            seen = environment.reset()
            for step in range(MOST_SITUATIONS * _STEPS_BETWEEN):
                if step % _STEPS_BETWEEN == 0:
                    found.append(
                        Example(f"step {step}", environment.render().copy(), seen[0].copy())
                    )
                seen = environment.step(draw.integers(0, environment.actions, 1)).observations
        return found
