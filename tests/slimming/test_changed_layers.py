"""Layers that are replaced, taken away or parametrized, before a conversion and after it."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_close, convert
from torch import Tensor, nn
from torch.nn.utils import prune

import anywidth as aw


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 10, 10)


def test_a_layer_that_was_replaced_is_named(x: Tensor) -> None:
    model = convert(network(), x)
    inner = next(path for path, m in model.named_modules() if isinstance(m, nn.BatchNorm2d))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for call in (
        lambda: aw.SandwichStep(model, optimizer, nn.functional.cross_entropy),
        lambda: aw.calibrate(model, [x], [0.5]),
        lambda: aw.extract(model, 0.5),
    ):
        with pytest.raises(aw.AnywidthError, match=f"'{inner}'"):
            call()


def test_a_layer_that_was_taken_away_is_named(x: Tensor) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1))
            self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 10))

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.features(x).flatten(1))

    model = convert(Classifier(), x)
    model.classifier = nn.Identity()
    with pytest.raises(aw.AnywidthError, match=r"classifier\.1"):
        aw.extract(model, 0.5)


@pytest.mark.parametrize(
    "change",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
)
def test_a_weight_that_is_taken_away_is_named(x: Tensor, change) -> None:
    model = convert(network(), x)
    with pytest.raises(aw.AnywidthError, match="weight"):
        change(model[0])


def test_spectral_norm_is_converted(x: Tensor) -> None:
    model = nn.Sequential(
        nn.utils.spectral_norm(nn.Conv2d(3, 16, 3)), nn.ReLU(), nn.Conv2d(16, 4, 1)
    )
    model.eval()
    expected = model(x)
    convert(model, x, allow_fixed=True)
    assert_close(model(x), expected, 1e-6)
