"""A classifier for export: a plain network that takes pixels, and example images."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anywidth.app.data.arrays import ARRAY_NAMES
from anywidth.app.data.classification import EVALUATION_RESIZE
from anywidth.app.tasks.classification.final_state import read_state
from anywidth.app.tasks.examples import Example, to_pixels
from anywidth.translating.deployment import Deployment

if TYPE_CHECKING:
    from anywidth.app.tasks.classification.task import TrainedClassifier

MOST_CLASSES = 10


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


def deployed_classifier(trained: TrainedClassifier) -> Deployment:
    state = read_state(trained.run)
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
    """How a client prepares images: photos are cropped as in validation, small images are not."""
    if trained.settings.data in ARRAY_NAMES:
        return {}
    height = read_state(trained.run)["input_shape"][1]
    return {"shorter_side": str(round(height * EVALUATION_RESIZE))}


def classifier_examples(trained: TrainedClassifier) -> list[Example]:
    """The first validation image of each class, for up to ten classes."""
    if trained.data is None:
        return []
    classes, first = trained.data.classes, dict[int, torch.Tensor]()
    wanted = min(MOST_CLASSES, len(classes))
    for images, labels in trained.data.validation:
        for image, label in zip(images.cpu(), labels.tolist(), strict=True):
            first.setdefault(label, image)
        if len(first) >= wanted:
            break
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (trained.data.mean, trained.data.std))
    return [
        Example(classes[label], to_pixels(image.float() * std + mean))
        for label, image in sorted(first.items())[:wanted]
    ]
