"""Small files in the layouts that data sets come in."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from anywidth.app.data.arrays import ImageArrays


def idx_bytes(values: Tensor) -> bytes:
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + bytes(values.flatten().tolist())


@pytest.fixture
def to_idx() -> Callable[[Tensor], bytes]:
    return idx_bytes


@pytest.fixture
def numbered() -> ImageArrays:
    """Ten 1 x 4 x 4 images: image n holds the value n everywhere, and its label is n modulo 3."""
    numbers = torch.arange(10)
    images = numbers.byte().view(10, 1, 1, 1).expand(10, 1, 4, 4).contiguous()
    return ImageArrays(images, numbers % 3, ("a", "b", "c"))


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """ImageNet's layout: 6 training and 3 validation images of 40 x 30 noise in each of 2 classes.

    Training image ``cat/2.jpg`` is file 2, ``dog/2.jpg`` is file 8.
    """
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 6), ("val", 3)):
        for name in ("cat", "dog"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(0, 256, (30, 40, 3), generator=generator).byte()
                Image.fromarray(pixels.numpy()).save(folder / f"{number}.jpg", quality=95)
    return tmp_path
