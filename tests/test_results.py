"""Which widths of a trained network have to be calibrated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_networks import PIXELS, converted, images_and_labels, without_norms

import anywidth as aw
from anywidth.results import has_statistics, missing_statistics, widths_to_calibrate


@pytest.fixture
def trained() -> Any:
    torch.manual_seed(0)
    return SimpleNamespace(model=converted())


def test_a_network_that_tracked_nothing_misses_every_width(trained: Any) -> None:
    assert has_statistics(trained.model)
    assert missing_statistics(trained, [0.5, 1.0]) == [0.5, 1.0]


def test_one_missing_width_means_that_all_are_calibrated(trained: Any) -> None:
    aw.calibrate(trained.model, [images_and_labels(16)], [0.5, 1.0])
    assert missing_statistics(trained, [0.25, 0.5, 1.0]) == [0.25]
    assert widths_to_calibrate(trained, [0.25, 0.5, 1.0]) == [0.25, 0.5, 1.0]
    assert widths_to_calibrate(trained, [0.5, 1.0]) == []


def test_without_batch_norm_nothing_is_missing() -> None:
    bare: Any = SimpleNamespace(model=converted(without_norms()))
    assert bare.model(torch.randn(2, 1, PIXELS, PIXELS)).shape == (2, 10)
    assert not has_statistics(bare.model)
    assert widths_to_calibrate(bare, [0.25, 0.5, 1.0]) == []
