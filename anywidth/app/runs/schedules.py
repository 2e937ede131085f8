"""How the learning rate changes over a run."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["linear", "cosine"]


def scheduled_rate(
    step: int, total: int, warmup: int, highest: float, schedule: Schedule = "linear"
) -> float:
    """Falls to zero over all steps, by a line or half a cosine, after a linear warm-up."""
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    if schedule == "cosine":
        return highest * 0.5 * (1 + math.cos(math.pi * done))
    return highest * (total - step) / max(1, total - warmup)
