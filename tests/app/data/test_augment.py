"""Batched augmentation against plain, slow versions of itself."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from anywidth.app.data.augment import (
    PARAMETERS,
    Augmentation,
    apply_parameters,
    channel_statistics,
    draw_parameters,
    normalize,
)
from anywidth.errors import AnywidthError

OFF = Augmentation(flip=False, crop_padding=0)
GREY = torch.full((1,), 0.5)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_batch(count: int = 64, channels: int = 3, height: int = 12, width: int = 10) -> Tensor:
    return torch.randint(1, 256, (count, channels, height, width), generator=seeded(1)).byte()


def augment(images: Tensor, augmentation: Augmentation) -> Tensor:
    """A batch augmented with what a loader would draw; cutout squares are grey."""
    return apply_parameters(images, augmentation, draw_parameters(len(images), seeded()), GREY)


def slow_crop_and_flip(image: Tensor, draws: Tensor, padding: int) -> Tensor:
    """Pad, cut out at the drawn corner, mirror: as one would write it for one image."""
    padded = functional.pad(image[None].float(), [padding] * 4, mode="reflect")[0]
    flip, shift_y, shift_x = draws[:3].tolist()
    top, left = int(shift_y * (2 * padding + 1)), int(shift_x * (2 * padding + 1))
    height, width = image.shape[1:]
    if flip < 0.5:
        padded = padded.flip(2)
        # The gather mirrors the position first and shifts then, so the shift is mirrored, too.
        left = 2 * padding - left
    return padded[:, top : top + height, left : left + width]


@pytest.mark.parametrize("padding", [1, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_and_flip_equal_the_slow_version(padding: int, dtype: torch.dtype) -> None:
    images = random_batch().to(dtype)
    parameters = draw_parameters(len(images), seeded())
    result = apply_parameters(images, Augmentation(crop_padding=padding), parameters, GREY)
    assert result.dtype == dtype
    for image, draws, got in zip(images, parameters.T, result, strict=True):
        assert torch.equal(got.float(), slow_crop_and_flip(image, draws, padding))


def test_about_half_of_the_images_are_flipped_and_the_others_left() -> None:
    images = random_batch(1000, 1, 4, 6)
    result = augment(images, Augmentation(crop_padding=0))
    flipped = (result == images.flip(3)).flatten(1).all(1)
    kept = (result == images).flatten(1).all(1)
    assert torch.equal(flipped, ~kept)
    assert 430 < int(flipped.sum()) < 570


def test_all_shifts_occur_about_equally_often() -> None:
    images = torch.zeros(9000, 1, 7, 7, dtype=torch.uint8)
    images[:, 0, 3, 3] = 1
    result = augment(images, Augmentation(flip=False, crop_padding=1))
    counts = result.long().sum((0, 1))
    assert int(counts.sum()) == 9000
    assert torch.equal(counts[2:5, 2:5].sum(), counts.sum())
    assert int(counts[2:5, 2:5].min()) > 850


def test_cutout_blanks_one_square_around_a_pixel_of_the_image() -> None:
    images = random_batch(500, 3, 12, 10)
    parameters = draw_parameters(500, seeded())
    settings = Augmentation(flip=False, crop_padding=0, cutout=5)
    fill = torch.tensor([0.0, 0.5, 1.0])
    result = apply_parameters(images, settings, parameters, fill=fill)
    centres = set()
    for number in range(500):
        y, x = int(parameters[3, number] * 12), int(parameters[4, number] * 10)
        centres.add((y, x))
        rows, columns = slice(max(0, y - 2), y + 3), slice(max(0, x - 2), x + 3)
        expected = images[number].clone()
        expected[:, rows, columns] = torch.tensor([0, 128, 255]).byte().view(3, 1, 1)
        assert torch.equal(result[number], expected)
    assert len(centres) > 110


def test_cutout_squares_are_zero_after_normalisation() -> None:
    mean, std = torch.tensor([0.2, 0.4, 0.6]), torch.tensor([0.1, 0.2, 0.3])
    settings = Augmentation(flip=False, crop_padding=0, cutout=30)
    images = random_batch()
    parameters = draw_parameters(len(images), seeded())
    result = normalize(apply_parameters(images, settings, parameters, mean), mean, std)
    assert result.dtype == torch.float32
    assert float(result.abs().max()) < 0.5 / 255 / 0.1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_shape_and_type_stay(dtype: torch.dtype, count: int) -> None:
    images = random_batch(7)[:count]
    images = images if dtype == torch.uint8 else (images / 255).to(dtype)
    result = augment(images, Augmentation(crop_padding=3, cutout=5))
    assert result.shape == images.shape
    assert result.dtype == dtype


def test_an_option_does_not_change_what_the_others_draw() -> None:
    images = random_batch()
    plain = augment(images, Augmentation())
    with_cutout = augment(images, Augmentation(cutout=2))
    assert int((plain != with_cutout).any(1).sum()) <= 4 * len(images)


def test_nothing_switched_on_changes_nothing() -> None:
    images = random_batch()
    assert torch.equal(augment(images, OFF), images)


def test_no_value_is_read_back_from_the_device() -> None:
    # Meta tensors have no values: whatever would wait for one raises.
    images = random_batch().to("meta")
    parameters = torch.empty((PARAMETERS, len(images)), device="meta")
    fill = torch.empty(3, device="meta")
    result = apply_parameters(images, Augmentation(cutout=5), parameters, fill)
    assert normalize(result, fill, fill).shape == images.shape


def test_normalisation_gives_mean_zero_and_deviation_one() -> None:
    images = random_batch(200)
    mean, std = channel_statistics(images)
    torch.testing.assert_close(
        torch.tensor(mean), (images.double() / 255).mean((0, 2, 3)).float(), rtol=1e-6, atol=0
    )
    of_bytes = normalize(images, torch.tensor(mean), torch.tensor(std))
    of_floats = normalize(images.float() / 255, torch.tensor(mean), torch.tensor(std))
    torch.testing.assert_close(of_bytes, of_floats)
    torch.testing.assert_close(of_bytes.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(
        of_bytes.std((0, 2, 3), correction=0), torch.ones(3), rtol=0, atol=1e-4
    )


def test_a_channel_without_contrast_can_be_normalised() -> None:
    mean, std = channel_statistics(torch.full((2, 1, 3, 3), 51, dtype=torch.uint8))
    assert mean == pytest.approx((0.2,))
    assert std == (1 / 255,)


def test_bad_settings_and_batches_are_refused() -> None:
    with pytest.raises(AnywidthError, match="cutout"):
        Augmentation(cutout=-1)
    with pytest.raises(AnywidthError, match="crop_padding"):
        augment(random_batch(), Augmentation(crop_padding=10))
    with pytest.raises(AnywidthError, match="int64"):
        augment(random_batch().long(), OFF)
