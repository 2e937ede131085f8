"""The bundled Fashion-MNIST images as ordinary data sets, and a small network for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anywidth as aw
from anywidth.app.data.arrays import load_arrays


def images(train: bool, count: int) -> TensorDataset:
    arrays = load_arrays("bundled", None, train=train)
    pixels = (arrays.images[:count].float() / 255 - 0.29) / 0.35
    return TensorDataset(pixels, arrays.labels[:count])


def block(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU()


def slimmable_network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *block(1, 32, stride=2), *block(32, 64, stride=2), *block(64, 64, stride=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    example = torch.randn(2, 1, 28, 28)
    return aw.slimmable(model, None, aw.WidthRange(0.25, 1.0, divisor=8), example_input=example)


@torch.no_grad()
def show_errors(model: nn.Module, widths: tuple[float, ...] = (0.25, 0.5, 1.0)) -> None:
    """Calibrates some widths and prints their errors on test images."""
    inputs, labels = images(train=False, count=500).tensors
    calibration = images(train=True, count=500).tensors[0].split(100)
    aw.calibrate(model, calibration, widths, process_group=None)  # by this process alone
    model.eval()
    for width in widths:
        with aw.at_width(model, width):
            wrong: Tensor = model(inputs).argmax(1) != labels
        print(f"width {width}: error {100 * wrong.float().mean():.1f} %")
