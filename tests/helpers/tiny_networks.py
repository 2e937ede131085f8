"""Networks small enough to train in a test; `--model tiny_networks:tiny` finds them too."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import anywidth as aw

PIXELS = 12


def tiny(num_classes: int = 10, dropout: float = 0.0) -> nn.Sequential:
    """Two convolutions with batch norm; every width from 4 to 16 channels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(16, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


def tiny_rgb(num_classes: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 1, 1), *tiny(num_classes))


class Pause(nn.Module):
    """Makes a step take long enough to be interrupted: seconds from the variable PAUSE."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return x


def slow(num_classes: int = 10) -> nn.Sequential:
    return nn.Sequential(*tiny(num_classes), Pause())


def without_norms() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(PIXELS**2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(),
        nn.Linear(16, 10),
    )  # fmt: skip


def converted(model: nn.Module | None = None, low: float = 0.25, high: float = 1.0) -> nn.Module:
    """`tiny` (or another), made slimmable by quarters."""
    model = tiny() if model is None else model
    example = torch.randn(2, 1, PIXELS, PIXELS)
    return aw.slimmable(model, None, aw.WidthRange(low, high, 4), example_input=example)


def images_and_labels(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, PIXELS, PIXELS, generator=generator)
    return images, torch.randint(10, (count,), generator=generator)


def shaken() -> nn.Module:
    """Converted, off its initial values, so that every channel has statistics of its own."""
    found = converted(tiny(dropout=0.5))
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return found


def batches_of(sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
    images, _ = images_and_labels(sum(sizes), seed)
    return list((2 * images + 0.5).split(list(sizes)))


def nonuniform(model: nn.Module) -> aw.ChannelConfig:
    return aw.plan_of(model).full.replace({"0": 12, "4": 8})
