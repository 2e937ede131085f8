"""Statistics of all widths in a checkpoint of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_networks import batches_of, converted, images_and_labels, shaken

import anywidth as aw


def test_they_go_through_a_file_that_holds_tensors_alone(tmp_path: Path) -> None:
    model, images = shaken(), images_and_labels(8)[0]
    aw.calibrate(model, batches_of([16, 16]), [0.25, 0.5, 1.0])
    state = aw.statistics_state(model)
    assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
    torch.save({"model": model.state_dict(), "statistics": state}, tmp_path / "checkpoint.pt")
    read = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    other = shaken().eval()
    other.load_state_dict(read["model"])
    aw.load_statistics_state(other, read["statistics"])
    assert aw.calibrated_widths(other) == aw.calibrated_widths(model) == [0.25, 0.5, 1.0]
    model.eval()
    for width in (0.25, 0.5, 1.0):
        with aw.at_width(model, width), aw.at_width(other, width), torch.no_grad():
            assert torch.equal(model(images), other(images))


def test_what_is_no_such_state_is_named() -> None:
    model = converted()
    state = aw.statistics_state(model)
    for bad in ({}, model.state_dict(), None, {**state, "widths": torch.zeros(3)}):
        with pytest.raises(aw.AnywidthError, match="widths"):
            aw.load_statistics_state(model, bad)  # type: ignore[arg-type]
    with pytest.raises(aw.AnywidthError, match="statistics"):
        aw.load_statistics_state(model, {"widths": torch.tensor([255, 1], dtype=torch.uint8)})
    aw.calibrate(model, batches_of([16, 16]), [0.25])
    lacking = aw.statistics_state(model)
    del lacking["0/1.running_mean"]
    with pytest.raises(aw.AnywidthError, match="missing"):
        aw.load_statistics_state(model, lacking)
