"""Runs that ended with the weights their networks began with: no test waits for a training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anywidth as aw
from anywidth.app.data.arrays import FASHION_MNIST_CLASSES
from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification import task as classification
from anywidth.app.tasks.reinforcement import policies
from anywidth.app.tasks.reinforcement import task as reinforcement
from anywidth.app.tasks.super_resolution import task as super_resolution
from anywidth.training.statistics_state import statistics_to_tensors

MEAN, STD = [0.3], [0.2]
CLASSES = list(FASHION_MNIST_CLASSES)


def classifier_run(folder: Path, widths: Sequence[float]) -> Path:
    """Of (1, 12, 12) images, calibrated at `widths`."""
    shape = (1, 12, 12)
    settings = classification.ClassificationSettings(model="tiny_networks:tiny", divisor=4)
    model = classification.build_model(settings, len(CLASSES), shape)
    aw.calibrate(model, [torch.randn(32, *shape) + 1], widths=widths)
    state = {"classes": CLASSES, "input_shape": shape, "mean": MEAN, "std": STD}
    return _finished(folder, settings, model, state)


def upscaler_run(folder: Path, **changes: Any) -> Path:
    settings = super_resolution.SuperResolutionSettings(channels=8, blocks=2, **changes)
    return _finished(folder, settings, super_resolution.build_model(settings), {})


def policy_run(folder: Path, environment: str, **changes: Any) -> Path:
    settings = reinforcement.ReinforcementSettings(environment=environment, **changes)
    actions, shape = policies.actions_and_shape(environment)
    model = policies.build_model(settings, actions, shape)
    return _finished(folder, settings, model, {"actions": actions, "observation_shape": shape})


def _finished(folder: Path, settings: Any, model: nn.Module, state: dict[str, Any]) -> Path:
    statistics, metadata = statistics_to_tensors(model)
    Run.create(folder, settings).save_final(
        {"model": model.state_dict(), "statistics": statistics},
        {"steps": 0, **state},
        metadata={"statistics": metadata},
    )
    return folder


def trained_otherwise(run: Path, **settings: object) -> None:
    """Make a run one that was trained with other settings."""
    config = json.loads((run / "config.json").read_text()) | settings
    (run / "config.json").write_text(json.dumps(config))
    finished = json.loads((run / "finished.json").read_text()) | {"settings": config}
    (run / "finished.json").write_text(json.dumps(finished))
