"""Bundles of small untrained networks for the three tasks, with examples to try."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tiny_networks import PIXELS, batches_of, converted
from torch import Tensor, nn

import anywidth as aw
from anywidth.app.tasks.super_resolution.trained import Upscaler
from anywidth.app.tasks.trained import Example, as_fact
from anywidth.deploying.bundling import named_widths, write_bundle
from anywidth.measuring.spectra import Spectrum, SpectrumPoint
from anywidth.models.wdsr import wdsr
from anywidth.slimming.state import state_of
from anywidth.translating.deployment import Deployment

CLASSES = ("shirt", "shoe", *(f"class {number}" for number in range(8)))
WIDTHS = (0.25, 0.5, 0.75, 1.0)


def classifier_bundle(folder: Path) -> Path:
    """Of (1, 12, 12) images, with errors of 4 to 1 percent."""
    model = converted()
    aw.calibrate(model, batches_of([16]), widths=WIDTHS)
    deployment = Deployment(
        (torch.rand(2, 1, PIXELS, PIXELS),),
        ("images",),
        ("logits",),
        ({0: "batch"},),
        takes="images in [0, 1]",
        facts={"classes": json.dumps(CLASSES), "examples": as_fact(_pictures(PIXELS, 1))},
        task="classification",
    )
    state = state_of(model)
    points = [
        SpectrumPoint(
            width,
            state.resolve(width),
            aw.macs(model, width),
            aw.parameter_count(model, width),
            {"top1_error": error},
        )
        for width, error in zip(WIDTHS, (4.0, 3.0, 2.0, 1.0), strict=True)
    ]
    return _write(folder, "classifier", model, deployment, WIDTHS, Spectrum("tiny", tuple(points)))


def upscaler_bundle(folder: Path) -> Path:
    """Of pictures of any size, twice as large."""
    model = wdsr(scale=2, channels=8, blocks=1)
    example = torch.rand(2, 3, 16, 16)
    aw.slimmable(model, None, aw.WidthRange(0.5, 1.0, 4), example_input=example)
    deployment = Deployment(
        (example,),
        ("images",),
        ("larger_images",),
        ({0: "batch", 2: "height", 3: "width"},),
        takes="images in [0, 1]",
        facts={"scale": "2", "examples": as_fact(_pictures(24, 3))},
        task="super_resolution",
        wrap=Upscaler,
    )
    return _write(folder, "upscaler", model, deployment, (0.5, 1.0))


class Policy(nn.Module):
    """Logits of three actions, and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Flatten())
        self.act, self.judge = nn.Linear(16 * 64, 3), nn.Linear(16 * 64, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.body(observations)
        return self.act(seen), self.judge(seen).squeeze(1)


def policy_bundle(folder: Path) -> Path:
    """Of (4, 10, 10) observations."""
    model = Policy()
    example = torch.rand(2, 4, 10, 10)
    aw.slimmable(model, None, aw.WidthRange(0.25, 1.0, 4), example_input=example)
    draw = np.random.default_rng(0)
    situations = [
        Example(one.name, one.picture, draw.random((4, 10, 10), np.float32))
        for one in _pictures(10, 3)
    ]
    deployment = Deployment(
        (example,),
        ("observations",),
        ("logits", "values"),
        ({0: "batch"},),
        takes="observations as the environment gives them",
        facts={"examples": as_fact(situations)},
        task="reinforcement",
    )
    return _write(folder, "policy", model, deployment, (0.25, 0.5, 1.0))


def _pictures(side: int, channels: int) -> list[Example]:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (2, side, side, channels), np.uint8)
    return [Example("a shirt", pixels[0]), Example("a shoe", pixels[1])]


def _write(
    folder: Path,
    name: str,
    model: nn.Module,
    deployment: Deployment,
    widths: Sequence[float],
    spectrum: Spectrum | None = None,
) -> Path:
    path = folder / f"{name}.anywidth"
    named = named_widths(model, widths)
    write_bundle(model.eval(), deployment, path, named, spectrum=spectrum, progress=False)
    return path
