"""Which widths a trained network has, and which of them are to be calibrated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_networks import PIXELS, converted, images_and_labels, without_norms
from torch import nn

import anywidth as aw
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.app.tasks.trained import Trained
from anywidth.errors import AnywidthError


class Finished(Trained):
    def calibrate(
        self, widths: Sequence[float], samples: int | None = None, method: str | None = None
    ) -> int:
        aw.calibrate(self.model, [images_and_labels(16)], widths)
        return 16


def finished(model: nn.Module, **changes: Any) -> Finished:
    return Finished(None, ClassificationSettings(**changes), model)  # type: ignore[arg-type]


def test_a_network_that_tracked_nothing_misses_every_width() -> None:
    trained = finished(converted())
    assert trained.has_statistics
    assert trained.uncalibrated([0.5, 1.0]) == [0.5, 1.0]


def test_one_missing_width_means_that_all_are_calibrated() -> None:
    trained = finished(converted().eval())
    trained.calibrate([0.5, 1.0])
    assert trained.uncalibrated([0.25, 0.5, 1.0]) == [0.25]
    before = norm_mean(trained, 0.5)
    aw.calibrate(trained.model, [images_and_labels(8)], [0.5])
    assert not torch.equal(norm_mean(trained, 0.5), before)
    trained.complete_statistics([0.5, 1.0])
    assert not torch.equal(norm_mean(trained, 0.5), before)
    trained.complete_statistics([0.25, 0.5, 1.0])
    assert trained.uncalibrated([0.25, 0.5, 1.0]) == []
    assert torch.equal(norm_mean(trained, 0.5), before)


def norm_mean(trained: Trained, width: float) -> torch.Tensor:
    with trained.at(width):
        norm = next(m for m in trained.model.modules() if isinstance(m, nn.BatchNorm2d))
        assert norm.running_mean is not None
        return norm.running_mean.clone()


def test_without_batch_norm_nothing_is_missing() -> None:
    bare = finished(converted(without_norms()))
    assert bare.model(torch.randn(2, 1, PIXELS, PIXELS)).shape == (2, 10)
    assert not bare.has_statistics
    assert bare.uncalibrated([0.25, 0.5, 1.0]) == []
    assert bare.chosen(0.3) == 0.3


# ---- the one width of an I-Net -------------------------------------------------------------------


def test_an_individual_network_is_run_whole_at_its_one_width() -> None:
    alone = finished(converted(low=1.0), method="i", width=0.25)
    alone.calibrate([1.0])
    assert alone.widths == [0.25]
    assert alone.chosen(None) == alone.chosen(0.25) == 0.25
    assert alone.own_width(0.25) == 1.0
    with alone.at(0.25) as config:
        assert config == aw.plan_of(alone.model).full


@pytest.mark.parametrize("width", [0.2, 0.5, 1.0, 7.0, math.nan])
def test_an_individual_network_has_no_other_width(width: float) -> None:
    alone = finished(converted(low=1.0), method="i", width=0.25)
    with pytest.raises(AnywidthError, match=r"0\.25"):
        alone.chosen(width)


@pytest.mark.parametrize("method", ["us", "i"])
def test_a_network_of_full_width_takes_widths_as_they_are(method: str) -> None:
    """An ordinary network sliced is the control."""
    wide = finished(converted(low=0.25), method=method)
    assert [wide.own_width(width) for width in (0.25, 0.5, 1.0)] == [0.25, 0.5, 1.0]
    assert max(wide.widths) == 1.0
