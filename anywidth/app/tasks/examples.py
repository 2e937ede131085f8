"""Inputs that a bundle brings along, to be tried on the server's page."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from anywidth.app.tasks.classification.task import TrainedClassifier
from anywidth.app.tasks.reinforcement.environments import make_environment
from anywidth.app.tasks.reinforcement.task import TrainedPolicy
from anywidth.app.tasks.super_resolution.task import TrainedUpscaler

MOST_CLASSES = 10
MOST_PICTURES = 4
MOST_SITUATIONS = 6
# A larger picture would keep the page waiting for every width.
_LARGEST_SIDE = 128
_STEPS_BETWEEN = 8


@dataclass(frozen=True)
class Example:
    """One input.

    Args:
        name: what it shows.
        picture: (height, width, channels) in uint8; the input itself if there is no tensor.
        tensor: the input of a network that takes no pictures, without a batch axis.
    """

    name: str
    picture: np.ndarray
    tensor: np.ndarray | None = None


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
        Example(classes[label], _pixels(image.float() * std + mean))
        for label, image in sorted(first.items())[:wanted]
    ]


def upscaler_examples(trained: TrainedUpscaler) -> list[Example]:
    """The middle of the first pictures it is evaluated on, small as the network gets them."""
    if trained.sets is None:
        return []
    found: list[Example] = []
    for pairs in trained.sets.values():
        for index, name in enumerate(pairs.names[: MOST_PICTURES - len(found)]):
            low = pairs[index][0]
            top, left = (max(0, side - _LARGEST_SIDE) // 2 for side in low.shape[-2:])
            middle = low[:, top : top + _LARGEST_SIDE, left : left + _LARGEST_SIDE]
            found.append(Example(name, middle.permute(1, 2, 0).numpy()))
    return found


def policy_examples(trained: TrainedPolicy) -> list[Example]:
    """Moments of a game that is played at random."""
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


def as_fact(examples: Iterable[Example]) -> str:
    """Examples as a bundle keeps them: pictures as PNG files, tensors as their bytes."""
    return json.dumps([_described(one) for one in examples])


def _described(example: Example) -> dict[str, object]:
    picture = example.picture
    file = io.BytesIO()
    Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture).save(
        file, "PNG", optimize=True
    )
    described: dict[str, object] = {"name": example.name, "picture": _base64(file.getvalue())}
    if example.tensor is not None:
        tensor = np.ascontiguousarray(example.tensor)
        described["tensor"] = {"shape": [1, *tensor.shape], "data": _base64(tensor.tobytes())}
    return described


def _pixels(image: torch.Tensor) -> np.ndarray:
    """(C, H, W) in [0, 1] as (H, W, C) in uint8."""
    return (image.clamp(0, 1) * 255 + 0.5).to(torch.uint8).permute(1, 2, 0).numpy()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
