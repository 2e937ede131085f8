"""What super-resolution and reinforcement learning make of their choices alike."""

from __future__ import annotations

import torch

from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings
from anywidth.app.tasks.super_resolution.settings import SuperResolutionSettings
from anywidth.training.sampling import Sampling

Choices = SuperResolutionSettings | ReinforcementSettings


def sampling_of(settings: Choices) -> Sampling:
    if settings.method == "i":
        return Sampling("fixed", widths=(1.0,), seed=settings.seed)
    return Sampling(count=settings.widths_per_step, lattice=settings.lattice, seed=settings.seed)


def precision_of(settings: Choices, device: torch.device) -> str:
    if settings.precision != "auto":
        return settings.precision
    return "tf32" if device.type == "cuda" else "float32"
