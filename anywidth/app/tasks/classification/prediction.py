"""Classify an image file with a trained network."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from anywidth.app.data.arrays import ARRAY_NAMES
from anywidth.app.data.classification import EVALUATION_RESIZE
from anywidth.app.data.image_reading import central_square, read_image
from anywidth.app.tasks.classification.final_state import read_state
from anywidth.app.tasks.classification.task import TrainedClassifier
from anywidth.errors import AnywidthError


def predict(trained: TrainedClassifier, image: Path, top: int = 5) -> list[tuple[str, float]]:
    """The most likely classes of an image file and their probabilities, at the current width."""
    state = read_state(trained.run)
    pixels = _read(image, state["input_shape"], crops=trained.settings.data not in ARRAY_NAMES)
    mean, std = (torch.tensor(state[name]).view(-1, 1, 1) for name in ("mean", "std"))
    batch = ((pixels.float() / 255 - mean) / std)[None]
    with torch.no_grad():
        logits = trained.model(batch.to(next(trained.model.parameters()).device))
    if not logits.isfinite().all():
        raise AnywidthError(
            f"{image}: the network of {trained.run.folder} answers NaN or infinity, so its weights "
            "or statistics are of no use; calibrate it again, or train again"
        )
    likely = logits.float().softmax(1)[0].topk(min(top, logits.shape[1]))
    return [
        (state["classes"][i], p)
        for p, i in zip(likely.values.tolist(), likely.indices.tolist(), strict=True)
    ]


def _read(image: Path, shape: tuple[int, int, int], crops: bool) -> Tensor:
    """The image preprocessed as in validation: photos are cropped to their middle."""
    from PIL import Image
    from torchvision.transforms.functional import pil_to_tensor

    channels, height, width = shape
    picture = read_image(image, "L" if channels == 1 else "RGB")
    if crops:
        picture = central_square(picture, height, round(height * EVALUATION_RESIZE))
    else:
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    pixels: Tensor = pil_to_tensor(picture)
    return pixels
