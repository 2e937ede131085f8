"""The augmentation of photos against Pillow's and torchvision's, image by image."""

import math
from itertools import permutations

import pytest
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import pil_to_tensor

from anywidth.app.data import folder_augment
from anywidth.app.data.folder_augment import (
    FolderAugmentation,
    augment,
    colour_changes,
    crop_box,
    draw,
)
from anywidth.app.data.folder_images import resized

ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
PLAIN = FolderAugmentation(jitter=0.0, flip=False)


def photos(count: int) -> Tensor:
    """Smooth uint8 pictures, some very bright, some very dark."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand((count, 3, 5, 6), generator=generator)
    light = torch.linspace(0.2, 1.6, count).view(-1, 1, 1, 1)
    smooth = torch.nn.functional.interpolate(coarse, (30, 40), mode="bicubic")
    return (255 * light * smooth).clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()


def colours(count: int) -> Tensor:
    return torch.stack([draw(0, 0, index).colours for index in range(count)])


def augmented(images: Tensor, augmentation: FolderAugmentation) -> Tensor:
    return augment(images, colour_changes(colours(len(images)), augmentation), augmentation)


def by_pillow(image: Tensor, draws: list[float], augmentation: FolderAugmentation) -> Tensor:
    picture = Image.fromarray(image.numpy())
    lowest = max(0.0, 1 - augmentation.jitter)
    factors = [lowest + (1 + augmentation.jitter - lowest) * share for share in draws[2:5]]
    for kind in list(permutations(range(3)))[int(6 * draws[1])]:
        picture = ENHANCERS[kind](picture).enhance(factors[kind])
    if draws[0] < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return pil_to_tensor(picture)


@pytest.mark.parametrize("jitter", [0.4, 1.5])
def test_colours_are_pillow_s_up_to_its_rounding(jitter: float) -> None:
    images, augmentation = photos(64), FolderAugmentation(jitter=jitter)
    expected = [
        by_pillow(image, draws, augmentation)
        for image, draws in zip(images, colours(64).tolist(), strict=True)
    ]
    difference = (augmented(images, augmentation) - torch.stack(expected)).abs()
    # Pillow rounds grey, and cuts off the fraction after each of three changes.
    growth = 1 + 2 * jitter
    assert float(difference.max()) < (1 + jitter) * (1 + growth + growth**2)
    assert float(difference.mean()) < 3 / 2


def test_every_image_is_changed_in_the_same_way_in_any_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images, augmentation = photos(20), FolderAugmentation(lighting=0.1)
    changes = colour_changes(colours(20), augmentation)
    whole = augment(images, changes, augmentation)
    alone = [augment(images[n : n + 1], changes[n : n + 1], augmentation) for n in range(20)]
    assert torch.equal(torch.cat(alone), whole)
    # A GPU takes all at once.
    monkeypatch.setattr(folder_augment, "_CACHED", 1000)
    assert torch.equal(augment(images, changes, augmentation), whole)
    assert augment(images[:0], changes[:0], augmentation).shape == (0, 3, 30, 40)


def test_what_is_switched_off_changes_nothing() -> None:
    images = photos(20)
    planes = images.permute(0, 3, 1, 2).float()
    assert torch.equal(augmented(images, PLAIN), planes)
    flipped = augmented(images, FolderAugmentation(jitter=0.0))
    is_flipped = colours(20)[:, 0] < 0.5
    assert 4 <= int(is_flipped.sum()) <= 16
    assert torch.equal(flipped[is_flipped], planes[is_flipped].flip(3))
    assert torch.equal(flipped[~is_flipped], planes[~is_flipped])


def test_lighting_adds_principal_components_of_the_colours() -> None:
    image = torch.tensor([128, 128, 250], dtype=torch.uint8).expand(2, 2, 2, 3)
    draws = torch.zeros(2, 8)
    # 255 * 0.2175 * (-0.5675, -0.5808, -0.5836) = (-31.47, -32.21, -32.37)
    draws[0, 5:] = torch.tensor([1.0, 0.0, 0.0])
    # 255 * (-2 * 0.0188 * second + 10 * 0.0045 * third) = (-2.30, -9.30, 11.48)
    draws[1, 5:] = torch.tensor([0.0, -2.0, 10.0])
    lit = FolderAugmentation(jitter=0.0, flip=False, lighting=1.0)
    first, others = augment(image, colour_changes(draws, lit), lit)
    assert first[:, 1, 1].round().tolist() == [97, 96, 218]
    assert others[:, 0, 1].round().tolist() == [126, 119, 255]


def test_numbers_depend_on_seed_epoch_and_index_alone() -> None:
    before = torch.get_rng_state()
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert len({tuple(draw(*place).crop) for place in places}) == 4
    assert draw(1, 2, 3).crop == draw(1, 2, 3).crop
    assert torch.equal(draw(1, 2, 3).colours, draw(1, 2, 3).colours)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (224, 224)])
def test_crops_are_distributed_as_torchvision_s(width: int, height: int) -> None:
    boxes = torch.tensor([crop_box(width, height, draw(0, 0, n).crop, 0.25) for n in range(3000)])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        like = torch.empty(3, height, width)
        found = [
            RandomResizedCrop.get_params(like, [0.25, 1.0], [3 / 4, 4 / 3]) for _ in range(3000)
        ]
    top, left, high, wide = torch.tensor(found).unbind(1)
    theirs = torch.stack([left, top, left + wide, top + high], 1)
    assert bool((boxes[:, :2] >= 0).all())
    assert bool((boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all())
    for measure in (lambda edges: edges.double().mean(0), lambda edges: edges.double().std(0)):
        torch.testing.assert_close(measure(boxes), measure(theirs), rtol=0, atol=9)
    sides = (boxes[:, 2:] - boxes[:, :2]).double()
    assert bool((sides.prod(1) > 0.245 * width * height).all())


def test_the_crop_of_a_strip_is_in_its_middle() -> None:
    draws = draw(0, 0, 0).crop
    assert crop_box(3000, 30, draws, 0.25) == (1480, 0, 1520, 30)
    assert crop_box(30, 3000, draws, 0.25) == (0, 1480, 30, 1520)
    assert crop_box(200_001, 1, draws, 0.25) == (100_000, 0, 100_001, 1)
    assert crop_box(1, 1, draws, 0.25) == (0, 0, 1, 1)


@pytest.mark.parametrize("side", [8, 30, 57])
def test_resizing_is_pillow_s_up_to_one_level(side: int) -> None:
    for image in photos(8):
        expected = Image.fromarray(image.numpy()).resize((side, side), Image.Resampling.BILINEAR)
        got = resized(image, side).permute(2, 0, 1).int()
        difference = (got - pil_to_tensor(expected).int()).abs()
        assert int(difference.max()) <= 1
        assert math.isclose(float(difference.float().mean()), 0, abs_tol=0.2)
