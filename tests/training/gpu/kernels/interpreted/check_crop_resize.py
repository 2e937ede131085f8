"""Crops of pictures of many sizes against PyTorch's antialiased resize of bytes."""

import interpreter  # noqa: F401  (makes Triton's interpreter work here)
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from anywidth.training.gpu.kernels.crop_resize import PICTURE_FIELDS, crop_and_resize

# (height, width), (left, top, width, height) of the crop
PICTURES = [
    ((37, 51), (3, 5, 40, 30)),
    ((37, 51), (0, 0, 51, 37)),  # all of it
    ((20, 90), (33, 2, 17, 17)),  # as large as the image
    ((9, 11), (2, 1, 5, 7)),  # enlarged
    ((150, 40), (1, 0, 38, 150)),  # reduced along one side alone
    ((140, 260), (7, 3, 251, 131)),
    ((1, 1), (0, 0, 1, 1)),
]


def _smooth(height: int, width: int) -> Tensor:
    coarse = torch.rand(1, 3, 6, 7)
    fine = interpolate(coarse, (height, width), mode="bicubic", align_corners=True)[0]
    return (255 * fine).clamp(0, 255).byte()


@pytest.mark.parametrize(("size", "is_noise"), [(17, True), (40, False)])
def test_crops_differ_by_one_level_at_most(size: int, is_noise: bool) -> None:
    torch.manual_seed(size)
    pictures, rows, expected = [], [], []
    for number, ((height, width), crop) in enumerate(PICTURES):
        noise = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
        picture = noise if is_noise else _smooth(height, width)
        pictures.append(picture)
        # In another order than their images.
        rows.append([picture.data_ptr(), len(PICTURES) - number, width, height, *crop])
        left, top, wide, high = crop
        cut = picture[None, :, top : top + high, left : left + wide]
        cut = cut.contiguous(memory_format=torch.channels_last)
        expected.append(interpolate(cut, (size, size), mode="bilinear", antialias=True)[0])
    images = torch.full((len(PICTURES) + 1, size, size, 3), 77, dtype=torch.uint8)
    crop_and_resize(torch.tensor(rows), images)
    assert bool((images[0] == 77).all())
    found = images[1:].flip(0).permute(0, 3, 1, 2)
    difference = (found.int() - torch.stack(expected).int()).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).float().mean()) < 0.04
    assert size != 17 or torch.equal(found[2], expected[2])
    assert len(rows[0]) == PICTURE_FIELDS


def test_no_picture_changes_nothing() -> None:
    images = torch.full((2, 8, 8, 3), 5, dtype=torch.uint8)
    crop_and_resize(torch.empty((0, PICTURE_FIELDS), dtype=torch.int64), images)
    assert bool((images == 5).all())
