"""gymnasium's Atari preprocessing, in step with ours: told how many no-ops each game began with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ale_py.env import AtariEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from anywidth.app.tasks.reinforcement.environments import atari


class NoOps:
    """How many frames without action each game began with, as ale-py last reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames = np.zeros(0, int)
        for name in ("reset", "recv"):
            monkeypatch.setattr(atari.AtariVectorEnv, name, self._spied(name))

    def _spied(self, name: str) -> Any:
        original = getattr(atari.AtariVectorEnv, name)

        def spied(environment: Any, **options: Any) -> Any:
            result = original(environment, **options)
            self.frames = result[-1]["episode_frame_number"]
            return result

        return spied


class Reference:
    """One game as gymnasium preprocesses it."""

    def __init__(self, game: str) -> None:
        self.raw = AtariEnv(game, frameskip=1, repeat_action_probability=0.0)
        self.stacked = FrameStackObservation(
            AtariPreprocessing(self.raw, noop_max=30), 4, padding_type="zero"
        )

    def reset(self, no_ops: int) -> np.ndarray:
        class Chance:
            def integers(self, low: int, high: int) -> int:
                return no_ops

        self.raw._np_random = Chance()  # type: ignore[assignment]
        observation, _ = self.stacked.reset()
        return np.asarray(observation)

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        observation, reward, terminated, truncated, _ = self.stacked.step(action)
        return np.asarray(observation), float(reward), terminated or truncated
