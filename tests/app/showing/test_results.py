"""Which widths a trained network has, which are to be calibrated, and what its report draws."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_networks import PIXELS, converted, images_and_labels, without_norms

import anywidth as aw
from anywidth.app.runs.metrics import MetricsLog
from anywidth.app.showing.results import (
    has_statistics,
    missing_statistics,
    network_width,
    network_widths,
    shown_width,
    training_rows,
    widths_to_calibrate,
)
from anywidth.errors import AnywidthError


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


# ---- the one width of an I-Net -------------------------------------------------------------------


def run_of(method: str, width: float, low: float, folder: Path = Path("runs/i")) -> Any:
    """A trained network whose own widths go from `low` to 1.0."""
    return SimpleNamespace(
        model=converted(low=low),
        settings=SimpleNamespace(method=method, width=width),
        run=SimpleNamespace(folder=folder, metrics_path=folder / "metrics.csv"),
        widths=[1.0] if method == "i" else [low, 1.0],
    )


def test_an_individual_network_is_run_whole_at_its_one_width() -> None:
    alone = run_of("i", 0.25, low=1.0)
    assert network_widths(alone, None) == network_widths(alone, [0.25]) == [1.0]
    assert network_width(alone, None) == network_width(alone, 0.25) == 1.0
    assert shown_width(alone, 1.0) == 0.25


@pytest.mark.parametrize("width", [0.2, 0.5, 1.0, 7.0, math.nan])
def test_an_individual_network_has_no_other_width(width: float) -> None:
    with pytest.raises(AnywidthError, match=r"0\.25"):
        network_widths(run_of("i", 0.25, low=1.0), [width])
    with pytest.raises(AnywidthError, match=r"0\.25"):
        network_width(run_of("i", 0.25, low=1.0), width)


@pytest.mark.parametrize("method", ["us", "i"])
def test_a_network_of_full_width_takes_widths_as_they_are(method: str) -> None:
    """An ordinary network sliced is the control."""
    wide = run_of(method, 1.0, low=0.25)
    assert network_widths(wide, None) == wide.widths
    assert network_widths(wide, [0.25, 0.5]) == [0.25, 0.5]
    assert network_width(wide, None) == 1.0
    assert shown_width(wide, 0.5) == 0.5


def test_curves_of_an_individual_network_are_drawn_once(tmp_path: Path) -> None:
    alone, wide = (run_of("i", 0.25, 1.0, tmp_path), run_of("us", 1.0, 0.25, tmp_path))
    with MetricsLog(tmp_path / "metrics.csv") as log:
        log.append(1, {"loss_max": 2.0, "loss_min": 2.0, "validation_psnr/1.0": 30.0})
    assert training_rows(alone) == [{"step": 1, "loss/0.25": 2.0, "validation_psnr/0.25": 30.0}]
    assert training_rows(wide)[0].keys() == {"step", "loss_max", "loss_min", "validation_psnr/1.0"}
