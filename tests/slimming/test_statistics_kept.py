"""Batch-norm statistics on disk, and what loading weights does to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_networks import batches_of, converted, nonuniform, shaken, tiny
from torch import nn

import anywidth as aw
from anywidth.files import load_tensors, save_tensors
from anywidth.training.statistics_state import load_statistics, statistics_to_tensors


@pytest.fixture
def model() -> nn.Module:
    return shaken()


def test_statistics_survive_a_file(model: nn.Module, tmp_path: Path) -> None:
    mixed = nonuniform(model)
    aw.calibrate(model, batches_of([16, 16]), [0.25, 0.5, mixed])
    tensors, text = statistics_to_tensors(model)
    save_tensors(tmp_path / "statistics.safetensors", tensors, text)
    twin = converted(tiny(dropout=0.5))
    twin.load_state_dict(model.state_dict())
    load_statistics(twin, *load_tensors(tmp_path / "statistics.safetensors"))
    assert aw.calibrated_widths(twin) == [0.25, 0.5, mixed, 1.0]
    images = batches_of([4], seed=9)[0]
    for width in (0.25, 0.5, mixed, 1.0):
        model.eval()
        twin.eval()
        with aw.at_width(model, width), aw.at_width(twin, width), torch.no_grad():
            assert torch.equal(model(images), twin(images))


def test_other_weights_end_the_statistics_of_narrower_widths(model: nn.Module) -> None:
    """The best checkpoint would be judged with the last one's."""
    aw.calibrate(model, batches_of([16]), [0.25, 0.5, 1.0])
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best)
    assert aw.calibrated_widths(model) == [0.25, 0.5, 1.0], "the same weights change nothing"
    model.load_state_dict({"9.bias": torch.zeros(10)}, strict=False)
    assert aw.calibrated_widths(model) == [0.25, 0.5, 1.0], "no norm depends on it"
    model.load_state_dict(tiny().state_dict())
    assert aw.calibrated_widths(model) == [1.0]
    model.eval()
    with (
        pytest.raises(aw.AnywidthError, match="calibrate"),
        aw.at_width(model, 0.5),
    ):
        model(batches_of([4])[0])
    model.load_state_dict(best)
    assert aw.calibrated_widths(model) == [0.25, 0.5, 1.0], "those are their weights"


def test_an_old_checkpoint_loads_at_a_narrow_width(model: nn.Module) -> None:
    """Those of before torch 0.4.1 count no batches; torch then asks the norm itself."""
    old = {n: t for n, t in tiny().state_dict().items() if "num_batches_tracked" not in n}
    model.eval()
    with aw.at_width(model, 0.5):
        model.load_state_dict(dict(old))
    assert torch.equal(model.state_dict()["4.weight"], old["4.weight"])


def test_tracked_but_unseen_statistics_stay_unready_on_disk(model: nn.Module) -> None:
    tensors, text = statistics_to_tensors(model)
    twin = converted(tiny())
    load_statistics(twin, tensors, text)
    assert aw.calibrated_widths(twin) == [1.0]


def test_statistics_take_the_dtype_of_the_network(model: nn.Module) -> None:
    aw.calibrate(model, batches_of([16]), [0.5])
    twin = converted(tiny()).double().eval()
    load_statistics(twin, *statistics_to_tensors(model))
    with aw.at_width(twin, 0.5), torch.no_grad():
        assert twin(batches_of([4])[0].double()).dtype == torch.float64


def test_foreign_statistics_are_refused(model: nn.Module) -> None:
    aw.calibrate(model, batches_of([16]), [0.5])
    tensors, text = statistics_to_tensors(model)
    with pytest.raises(aw.AnywidthError, match="statistics"):
        load_statistics(model, tensors, {})
    lacking = {name: tensor for name, tensor in tensors.items() if "5.running_var" not in name}
    with pytest.raises(aw.AnywidthError, match="'5'"):
        load_statistics(model, lacking, text)
    cut = {name: tensor[:1] if tensor.dim() else tensor for name, tensor in tensors.items()}
    with pytest.raises(aw.AnywidthError, match=r"\(1,\)"):
        load_statistics(model, cut, text)
    assert aw.calibrated_widths(model) == [0.5, 1.0]
    other = aw.slimmable(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)),
        example_input=torch.randn(3, 4),
    )
    with pytest.raises(aw.AnywidthError, match="another"):
        load_statistics(other, tensors, text)
