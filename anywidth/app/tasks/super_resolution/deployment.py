"""An upscaler for export: a plain network that takes pixels, and example pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from anywidth.app.tasks.examples import Example
from anywidth.translating.deployment import Deployment

if TYPE_CHECKING:
    from anywidth.app.tasks.super_resolution.task import TrainedUpscaler

MOST_PICTURES = 4
# Latency is measured with a picture of this size.
_EXAMPLE_PIXELS = 64
# A larger picture would be slow on the page at every width.
_LARGEST_SIDE = 128


class Upscaler(nn.Module):
    """Takes (N, 3, H, W) images in [0, 1] and returns larger ones, also in [0, 1]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        larger: Tensor = self.network(images)
        return larger.clamp(0, 1)


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


def upscaler_examples(trained: TrainedUpscaler) -> list[Example]:
    """The middle of the first evaluation pictures, at low resolution."""
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
