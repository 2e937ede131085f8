"""What a trained classifier sees in an image file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from anywidth.app.data.arrays import ARRAY_NAMES
from anywidth.app.data.classification import EVALUATION_RESIZE
from anywidth.app.tasks.classification.task import TrainedClassifier
from anywidth.errors import AnywidthError


def predict(trained: TrainedClassifier, image: Path, top: int = 5) -> list[tuple[str, float]]:
    """The most likely classes of an image file and their probabilities, at the present width."""
    if top < 1:
        raise AnywidthError(f"top={top}: expected at least 1 class")
    state = trained.run.state()
    pixels = _read(image, state["input_shape"], crops=trained.settings.data not in ARRAY_NAMES)
    mean, std = (torch.tensor(state[name]).view(-1, 1, 1) for name in ("mean", "std"))
    batch = ((pixels.float() / 255 - mean) / std)[None]
    with torch.no_grad():
        logits = trained.model(batch.to(next(trained.model.parameters()).device))
    likely = logits.float().softmax(1)[0].topk(min(top, logits.shape[1]))
    return [
        (state["classes"][i], p)
        for p, i in zip(likely.values.tolist(), likely.indices.tolist(), strict=True)
    ]


def _read(image: Path, shape: tuple[int, int, int], crops: bool) -> Tensor:
    """The image as validation would see it: folders of photos crop their middle."""
    from PIL import Image, UnidentifiedImageError
    from torchvision.transforms.v2 import functional as transforms

    channels, height, width = shape
    try:
        with Image.open(image) as opened:
            picture = opened.convert("L" if channels == 1 else "RGB")
    except FileNotFoundError as error:
        raise AnywidthError(f"no image {image}: expected the path of an image file") from error
    except (UnidentifiedImageError, OSError) as error:
        raise AnywidthError(f"{image} is not an image that can be read: {error}") from error
    pixels = transforms.pil_to_tensor(picture)
    if not crops:
        return transforms.resize(pixels, [height, width], antialias=True)
    shorter = transforms.resize(pixels, [round(height * EVALUATION_RESIZE)], antialias=True)
    return transforms.center_crop(shorter, [height, width])
