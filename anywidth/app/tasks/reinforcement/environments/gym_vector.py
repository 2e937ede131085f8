"""Gymnasium environments with numbered actions, such as CartPole."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from anywidth.app.tasks.reinforcement.environments import Outcome, VectorEnvironment
from anywidth.errors import AnywidthError


class GymEnvironment(VectorEnvironment):
    """Copies of a gymnasium environment, stepped one after the other."""

    def __init__(
        self, name: str, count: int, seed: int, *, most_steps: int | None, rendered: bool
    ) -> None:
        limit: dict[str, Any] = {} if most_steps is None else {"max_episode_steps": most_steps}
        try:
            self._games = gymnasium.make_vec(
                name,
                num_envs=count,
                vectorization_mode="sync",
                vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
                render_mode="rgb_array" if rendered else None,
                **limit,
            )
        except ImportError as error:
            raise AnywidthError(
                f"gymnasium cannot make {name!r}: {error}; install what it needs"
            ) from error
        except Exception as error:  # an environment may raise anything
            raise AnywidthError(
                f"gymnasium cannot make {name!r}: {error}. Expected a name such as CartPole-v1; "
                "gymnasium.pprint_registry() lists all"
            ) from error
        seen, acts = self._games.single_observation_space, self._games.single_action_space
        if not isinstance(seen, Box) or not isinstance(acts, Discrete) or acts.start != 0:
            self._games.close()
            raise AnywidthError(
                f"{name} has observations {seen} and actions {acts}: expected a Box of numbers and "
                "actions numbered from 0"
            )
        self._kind = np.uint8 if seen.dtype == np.uint8 else np.float32
        super().__init__(count, seed, int(acts.n), seen.shape)
        self.frames_per_second = int(self._games.metadata.get("render_fps", 30))

    def reset(self) -> np.ndarray:
        self._scores[:] = 0
        observations, _ = self._games.reset(seed=self._seeds.tolist())
        return observations.astype(self._kind)

    def step(self, actions: np.ndarray) -> Outcome:
        observations, rewards, terminated, truncated, _ = self._games.step(actions)
        finished = terminated | truncated
        scores = self._scores_of(rewards, finished)
        return Outcome(
            observations.astype(self._kind), rewards.astype(np.float32), finished, scores, finished
        )

    def render(self) -> np.ndarray:
        try:
            frames: Any = self._games.render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise AnywidthError(f"gymnasium cannot render this environment: {error}") from error
        return np.asarray(frames[0])

    def close(self) -> None:
        self._games.close()
