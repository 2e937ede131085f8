import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from anywidth.app.tasks.super_resolution.image_quality import luma, psnr, ssim


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ssim_of_planes(x: NDArray, y: NDArray) -> float:
    """Wang et al. 2004, equation 13, window by window."""
    axis = np.arange(11) - 5
    window = np.exp(-(axis[:, None] ** 2 + axis[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for top in range(x.shape[0] - 10):
        for left in range(x.shape[1] - 10):
            a, b = x[top : top + 11, left : left + 11], y[top : top + 11, left : left + 11]
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            variance_a = (window * (a - mean_a) ** 2).sum()
            variance_b = (window * (b - mean_b) ** 2).sum()
            covariance = (window * (a - mean_a) * (b - mean_b)).sum()
            c1, c2 = 0.01**2, 0.03**2
            values.append(
                (2 * mean_a * mean_b + c1)
                * (2 * covariance + c2)
                / ((mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2))
            )
    return float(np.mean(values))


def test_luma_of_the_primaries_is_matlabs() -> None:
    # rgb2ycbcr(uint8) of black, white, red, green and blue, before it rounds.
    colours = torch.tensor(
        [[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255]], dtype=torch.uint8
    )
    expected = torch.tensor([16.0, 235.0, 81.481, 144.553, 40.966])
    torch.testing.assert_close(luma(colours.reshape(5, 3, 1, 1)).flatten() * 255, expected)
    floats = luma(colours.reshape(5, 3, 1, 1) / 255)
    assert floats.shape == (5, 1, 1, 1)
    torch.testing.assert_close(floats.flatten() * 255, expected)


def test_psnr_of_a_known_error_and_of_none() -> None:
    target = images(3, 1, 8, 8) * 0.5
    shifted = target + torch.tensor([0.1, 0.01, 0.0]).reshape(3, 1, 1, 1)
    values = psnr(shifted, target)
    torch.testing.assert_close(values[:2], torch.tensor([20.0, 40.0]).double(), atol=1e-5, rtol=0)
    assert values[2] == math.inf


def test_psnr_of_bytes_is_that_of_the_same_floats() -> None:
    a, b = ((images(2, 3, 9, 9, seed=s) * 255).to(torch.uint8) for s in (1, 2))
    torch.testing.assert_close(psnr(a, b), psnr(a.double() / 255, b.double() / 255))


@pytest.mark.parametrize("measure", [psnr, ssim])
def test_border_is_cut_from_every_side(measure: Callable[..., torch.Tensor]) -> None:
    a, b = images(1, 1, 20, 18, seed=1), images(1, 1, 20, 18, seed=2)
    inside = measure(a[..., 3:-3, 3:-3], b[..., 3:-3, 3:-3])
    assert torch.equal(measure(a, b, border=3), inside)
    assert not torch.equal(measure(a, b), inside)


@pytest.mark.parametrize("size", [(11, 11), (13, 20)])
def test_ssim_is_the_published_one(size: tuple[int, int]) -> None:
    a = images(2, 2, *size)
    b = (a + 0.2 * images(2, 2, *size, seed=1)).clamp(0, 1)
    expected = [
        np.mean([ssim_of_planes(a[n, c].numpy(), b[n, c].numpy()) for c in range(2)])
        for n in range(2)
    ]
    torch.testing.assert_close(ssim(a, b), torch.tensor(expected), rtol=1e-9, atol=0)


def test_ssim_of_flat_single_precision_images_keeps_its_digits() -> None:
    a = torch.full((1, 1, 16, 16), 0.9)
    b = torch.full((1, 1, 16, 16), 0.8)
    expected = (2 * 0.9 * 0.8 + 1e-4) / (0.9**2 + 0.8**2 + 1e-4)
    assert ssim(a, b).item() == pytest.approx(expected, abs=1e-7)
    assert ssim(a, a).item() == pytest.approx(1, abs=1e-12)


def test_a_batch_is_measured_image_by_image() -> None:
    a, b = images(3, 1, 16, 16, seed=1), images(3, 1, 16, 16, seed=2)
    for measure in (psnr, ssim):
        one_by_one = torch.cat([measure(a[i : i + 1], b[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(measure(a, b), one_by_one)
