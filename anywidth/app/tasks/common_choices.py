"""What super-resolution and reinforcement learning make of their choices alike."""

from __future__ import annotations

import torch

from anywidth.app.tasks.reinforcement.config import ReinforcementConfig
from anywidth.app.tasks.super_resolution.config import SuperResolutionConfig
from anywidth.training.sampling import Sampling

Choices = SuperResolutionConfig | ReinforcementConfig


def sampling_of(config: Choices) -> Sampling:
    if config.method == "i":
        return Sampling("fixed", widths=(1.0,), seed=config.seed)
    return Sampling(count=config.widths_per_step, lattice=config.lattice, seed=config.seed)


def precision_of(config: Choices, device: torch.device) -> str:
    if config.precision != "auto":
        return config.precision
    return "tf32" if device.type == "cuda" else "float32"
