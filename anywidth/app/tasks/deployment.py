"""What a finished run hands to a device: a plain network that takes what a device has.

Whatever was done to an image before the network is in it, so that pixels go in and answers come
out.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.app.data.arrays import ARRAY_NAMES
from anywidth.app.data.classification import EVALUATION_RESIZE
from anywidth.app.tasks.classification.task import TrainedClassifier
from anywidth.app.tasks.reinforcement.environments import make_environment
from anywidth.app.tasks.reinforcement.task import TrainedPolicy
from anywidth.app.tasks.super_resolution.task import TrainedUpscaler
from anywidth.deploying.deployment import Deployment

# Latency is measured with a picture of this size.
_EXAMPLE_PIXELS = 64


class Classifier(nn.Module):
    """Takes (N, C, H, W) images in [0, 1] and returns logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Any:
        return self.network((images - self.mean) / self.std)


class Upscaler(nn.Module):
    """Takes (N, 3, H, W) images in [0, 1] and returns larger ones, in [0, 1] too."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        larger: Tensor = self.network(images)
        return larger.clamp(0, 1)


def deployed_classifier(trained: TrainedClassifier) -> Deployment:
    state = trained.run.state()
    return Deployment(
        (torch.rand(2, *state["input_shape"]),),
        ("images",),
        ("logits",),
        ({0: "batch"},),
        takes="images in [0, 1]",
        facts={"classes": json.dumps(state["classes"]), **_cropping(trained)},
        task=trained.settings.task,
        wrap=lambda network: Classifier(network, state["mean"], state["std"]),
    )


def _cropping(trained: TrainedClassifier) -> dict[str, str]:
    """Photographs are cut to size, as validation does; small images are taken whole."""
    if trained.settings.data in ARRAY_NAMES:
        return {}
    height = trained.run.state()["input_shape"][1]
    return {"shorter_side": str(round(height * EVALUATION_RESIZE))}


def deployed_upscaler(trained: TrainedUpscaler) -> Deployment:
    return Deployment(
        (torch.rand(2, 3, _EXAMPLE_PIXELS, _EXAMPLE_PIXELS),),
        ("images",),
        ("larger_images",),
        ({0: "batch", 2: "height", 3: "width"},),
        takes="images in [0, 1], red, green and blue",
        facts={"scale": str(trained.model.scale)},
        task=trained.settings.task,
        wrap=Upscaler,
    )


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
