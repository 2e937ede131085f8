"""A policy for export: its network with inputs and outputs, and example observations."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from anywidth.app.tasks.examples import Example
from anywidth.app.tasks.reinforcement.environments import make_environment
from anywidth.translating.deployment import Deployment

if TYPE_CHECKING:
    from anywidth.app.tasks.reinforcement.task import TrainedPolicy

MOST_SITUATIONS = 6
_STEPS_BETWEEN = 8


def deployed_policy(trained: TrainedPolicy) -> Deployment:
    environment = make_environment(trained.settings.environment, 1, seed=0)
    with contextlib.closing(environment):
        seen = torch.from_numpy(environment.reset())
    return Deployment(
        (seen.repeat(2, *[1] * (seen.ndim - 1)),),
        ("observations",),
        ("logits", "values"),
        ({0: "batch"},),
        takes="observations as the environment gives them",
        facts={"environment": trained.settings.environment},
        task=trained.settings.task,
    )


def policy_examples(trained: TrainedPolicy) -> list[Example]:
    """Observations from a random game."""
    environment = make_environment(
        trained.settings.environment, 1, seed=0, training=False, rendered=True
    )
    draw = np.random.default_rng(0)
    found = []
    with contextlib.closing(environment):
        seen = environment.reset()
        for step in range(MOST_SITUATIONS * _STEPS_BETWEEN):
            if step % _STEPS_BETWEEN == 0:
                found.append(Example(f"step {step}", environment.render().copy(), seen[0].copy()))
            seen = environment.step(draw.integers(0, environment.actions, 1)).observations
    return found
