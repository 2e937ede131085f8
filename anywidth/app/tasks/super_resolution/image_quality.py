"""The quality of upscaled images: PSNR and SSIM on luma, as papers report them."""

import math

import torch
from torch import Tensor

WINDOW = 11
SIGMA = 1.5
LUMA_WEIGHTS = (65.481 / 255, 128.553 / 255, 24.966 / 255)
LUMA_OFFSET = 16 / 255


def luma(images: Tensor) -> Tensor:
    """The Y of ITU-R BT.601 as in MATLAB's `rgb2ycbcr`: (N, 3, H, W) to (N, 1, H, W).

    Takes floating point in [0, 1] or uint8; returns floating point in [16/255, 235/255].
    """
    unit = _unit_range(images)
    weights = torch.tensor(LUMA_WEIGHTS, dtype=unit.dtype, device=unit.device)
    return (unit * weights.reshape(1, 3, 1, 1)).sum(1, keepdim=True) + LUMA_OFFSET


def psnr(images: Tensor, targets: Tensor, border: int = 0) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB, shape (N,); infinite if they are equal.

    Takes floating point in [0, 1] or uint8 with any number of channels. `border` pixels are first
    cut from each side; by convention this is the scale. Published super-resolution numbers are
    `psnr(luma(images), luma(targets), border=scale)` of predictions rounded to 8 bit.
    """
    images, targets = _inside(images, border), _inside(targets, border)
    error = (images - targets).square().flatten(1).mean(1)
    return -10 * error.log10()


def ssim(images: Tensor, targets: Tensor, border: int = 0) -> Tensor:
    """Structural similarity of each image, shape (N,): Wang et al. 2004 with its own constants.

    Means, variances and covariance under an 11x11 Gaussian of sigma 1.5, for all windows inside the
    image; K1 = 0.01, K2 = 0.03; averaged over windows and channels.
    Input and `border` as in `psnr`.
    """
    images, targets = _inside(images, border), _inside(targets, border)
    moments = torch.stack([images, targets, images**2, targets**2, images * targets])
    mean_x, mean_y, square_x, square_y, product = _blur(moments)
    variance_x, variance_y = square_x - mean_x**2, square_y - mean_y**2
    covariance = product - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    similarity = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    similarity = similarity / ((mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2))
    return similarity.flatten(1).mean(1)


def _blur(planes: Tensor) -> Tensor:
    """Gaussian mean for all windows inside the image, one direction after the other.

    A sum of shifted images is several times faster on a CPU than a convolution of one channel.
    """
    window = [math.exp(-((k - WINDOW // 2) ** 2) / (2 * SIGMA**2)) for k in range(WINDOW)]
    for dim in (-2, -1):
        places = planes.shape[dim] - WINDOW + 1
        blurred = torch.zeros_like(planes.narrow(dim, 0, places))
        for shift, weight in enumerate(window):
            blurred.add_(planes.narrow(dim, shift, places), alpha=weight / sum(window))
        planes = blurred
    return planes


def _unit_range(images: Tensor) -> Tensor:
    """Floating point in [0, 1], at least float32: half precision is too coarse for 40 dB."""
    if images.dtype == torch.uint8:
        return images.float() / 255
    return images if images.dtype == torch.float64 else images.float()


def _inside(images: Tensor, border: int) -> Tensor:
    """The images in double precision without their border.

    Variances are differences of large numbers; in single precision, flat images would be wrong in
    the third digit.
    """
    inside = slice(border, -border or None)
    return _unit_range(images)[..., inside, inside].double()
