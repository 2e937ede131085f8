"""Example inputs in a bundle, for the server's page."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image


@dataclass(frozen=True)
class Example:
    """One input.

    Args:
        name: describes the input.
        picture: (height, width, channels) in uint8; the input itself if there is no tensor.
        tensor: the input of a network that does not take pictures, without a batch axis.
    """

    name: str
    picture: np.ndarray
    tensor: np.ndarray | None = None


def as_fact(examples: Iterable[Example]) -> str:
    """Examples as text for a bundle: pictures as PNG files, tensors as bytes."""
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


def to_pixels(image: torch.Tensor) -> np.ndarray:
    """(C, H, W) in [0, 1] as (H, W, C) in uint8."""
    return (image.clamp(0, 1) * 255 + 0.5).to(torch.uint8).permute(1, 2, 0).numpy()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
