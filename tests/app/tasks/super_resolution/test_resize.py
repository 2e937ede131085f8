import os
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from anywidth.app.tasks.super_resolution.image_quality import luma, psnr
from anywidth.app.tasks.super_resolution.pictures import BUNDLED, PicturePairs, load_pairs
from anywidth.app.tasks.super_resolution.resize import (
    crop_to_multiple,
    downscale,
    round_to_uint8,
    upscale,
)

FIGURES = {"Set5": 33.68, "Set14": 30.33, "BSD100": 29.57}
EVALUATION_SETS = os.environ.get("ANYWIDTH_SR_EVAL")


def cubic(x: float) -> float:
    x = abs(x)
    if x <= 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x <= 2 else 0.0


def imresize_rows(image: NDArray, scale: float) -> NDArray:
    """MATLAB's imresize along the first axis, written from its documentation, pixel by pixel."""
    length = image.shape[0]
    out_length = int(np.ceil(length * scale))
    shrink = min(scale, 1.0)
    out = np.zeros((out_length, *image.shape[1:]))
    for i in range(out_length):
        centre = (i + 0.5) / scale - 0.5
        reach = int(np.ceil(2 / shrink)) + 1
        positions = range(int(np.floor(centre)) - reach, int(np.floor(centre)) + reach + 1)
        weights = np.array([cubic(shrink * (centre - position)) for position in positions])
        for position, weight in zip(positions, weights / weights.sum(), strict=True):
            mirrored = position % (2 * length)
            mirrored = mirrored if mirrored < length else 2 * length - 1 - mirrored
            out[i] += weight * image[mirrored]
    return out


def imresize(images: torch.Tensor, scale: float) -> torch.Tensor:
    array = images.double().numpy().transpose(2, 3, 0, 1)
    array = imresize_rows(array, scale)
    array = imresize_rows(array.swapaxes(0, 1), scale).swapaxes(0, 1)
    return torch.from_numpy(array.transpose(2, 3, 0, 1).copy())


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("factor", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [(24, 36), (12, 12)])
def test_resizing_is_matlabs_up_to_the_border(factor: int, size: tuple[int, int]) -> None:
    images = noise(2, 3, *size)
    torch.testing.assert_close(downscale(images, factor), imresize(images, 1 / factor))
    torch.testing.assert_close(upscale(images, factor), imresize(images, factor))


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_images_smaller_than_the_kernel_are_mirrored_again(factor: int) -> None:
    images = noise(1, 1, factor, factor)
    torch.testing.assert_close(downscale(images, factor), imresize(images, 1 / factor))
    one = noise(1, 1, 1, 2)
    torch.testing.assert_close(upscale(one, factor), imresize(one, factor))


@pytest.mark.parametrize("factor", [2, 3])
def test_bytes_are_rounded_once_at_the_end_and_clamped(factor: int) -> None:
    images = torch.zeros(1, 3, 36, 24, dtype=torch.uint8)
    images[..., 13:, :11] = 255
    for result, exact in (
        (downscale(images, factor), imresize(images, 1 / factor)),
        (upscale(images, factor), imresize(images, factor)),
    ):
        assert result.dtype == torch.uint8
        assert exact.min() < 0
        assert exact.max() > 255
        # Half a level, and a little for the exact halves that single precision may miss.
        assert (result.double() - exact.clamp(0, 255)).abs().max() < 0.5 + 1e-3


def test_halves_round_up_as_in_matlab() -> None:
    levels = torch.tensor([0.5, 1.5, 2.5, 254.5, -3.0, 300.0])
    assert round_to_uint8(levels / 255).tolist() == [1, 2, 3, 255, 0, 255]


def test_single_precision_keeps_its_type_and_range() -> None:
    images = noise(1, 3, 8, 8).float()
    assert downscale(images, 2).dtype == torch.float32
    flat = torch.full((1, 1, 6, 6), 0.3)
    torch.testing.assert_close(upscale(flat, 3), torch.full((1, 1, 18, 18), 0.3))


def test_crop_keeps_the_top_left() -> None:
    images = noise(1, 1, 11, 9)
    assert torch.equal(crop_to_multiple(images, 4), images[..., :8, :8])
    assert crop_to_multiple(images, 1).shape == images.shape


def bicubic_psnr(pairs: PicturePairs) -> float:
    values = [
        psnr(luma(upscale(low[None], 2)), luma(high[None]), border=2).item()
        for low, high in (pairs[index] for index in range(len(pairs)))
    ]
    return sum(values) / len(values)


def test_bicubic_figure_of_the_bundled_pictures() -> None:
    pairs = load_pairs(BUNDLED / "eval")
    assert bicubic_psnr(pairs) == pytest.approx(23.44, abs=0.01)
    values = []
    for index in range(len(pairs)):
        high = pairs[index][1][None]
        low = imresize(high, 0.5).clamp(0, 255).round()
        again = imresize(low, 2).clamp(0, 255).round()
        values.append(psnr(luma(again / 255), luma(high.double() / 255), border=2).item())
    assert bicubic_psnr(pairs) == pytest.approx(sum(values) / len(values), abs=0.003)


if EVALUATION_SETS:

    @pytest.mark.parametrize("name", FIGURES)
    def test_bicubic_figures_of_the_published_sets(name: str) -> None:
        pairs = load_pairs(Path(EVALUATION_SETS) / name)
        assert bicubic_psnr(pairs) == pytest.approx(FIGURES[name], abs=0.03)
