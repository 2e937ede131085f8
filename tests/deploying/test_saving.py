"""A converted network in one file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_networks import PIXELS, converted, images_and_labels, tiny, tiny_rgb, without_norms
from torch import nn

import anywidth as aw
from anywidth.files import load_tensors, save_tensors
from anywidth.slimming.norm_statistics import tracked_statistics
from anywidth.slimming.switchable import add_private_affine

WIDTHS = [0.25, 0.5, 0.75, 1.0]


def calibrated(model: nn.Module | None = None) -> nn.Module:
    """Off its initial values, so that weights and statistics differ from those of a new one."""
    model = converted(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    images, _ = images_and_labels(32)
    aw.calibrate(model, (images + 0.5).split(16), WIDTHS)
    return model.eval()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "network.safetensors"


def assert_same(model: nn.Module, other: nn.Module) -> None:
    images, _ = images_and_labels(4, seed=9)
    for width in WIDTHS:
        with aw.at_width(model, width), aw.at_width(other, width), torch.no_grad():
            assert torch.equal(model(images), other(images))


def everything(model: nn.Module) -> list[torch.Tensor]:
    means = [entry.running_mean for entry in tracked_statistics(model)]
    return [tensor.clone() for tensor in [*model.state_dict().values(), *means]]


def test_weights_and_all_widths_come_back(path: Path) -> None:
    model = calibrated()
    mixed = aw.plan_of(model).resolve(0.5).replace({"0": 12})
    aw.calibrate(model, [images_and_labels(16)[0]], [mixed])
    aw.save(model, path)
    twin = converted().eval()
    aw.set_width(twin, 0.5)
    aw.load(twin, str(path))
    assert aw.calibrated_widths(twin) == [0.25, 0.5, 0.75, mixed, 1.0]
    assert_same(model, twin)
    assert twin[0].out_channels == 8  # type: ignore[index]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_widths_that_the_file_lacks_are_forgotten(path: Path) -> None:
    aw.save(converted(), path)
    model = calibrated()
    aw.load(model, path)
    assert aw.calibrated_widths(model) == [1.0]


def test_a_network_without_batch_norm(path: Path) -> None:
    model, twin = converted(without_norms()), converted(without_norms())
    aw.save(model, path)
    aw.load(twin, path)
    assert_same(model, twin)


def test_private_scales_come_back(path: Path) -> None:
    model, twin = calibrated(), converted().eval()
    for one in (model, twin):
        add_private_affine(one, [0.25, 0.5])
    with torch.no_grad():
        model[1].private_affine.weight[0].mul_(2)  # type: ignore[index, union-attr]
    aw.save(model, path)
    aw.load(twin, path)
    assert_same(model, twin)
    with pytest.raises(aw.AnywidthError, match="private_affine"):
        aw.load(converted(), path)


def test_a_network_that_is_not_converted_is_named(path: Path) -> None:
    with pytest.raises(aw.AnywidthError, match="converted"):
        aw.save(tiny(), path)
    aw.save(converted(), path)
    with pytest.raises(aw.AnywidthError, match="converted"):
        aw.load(tiny(), path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path, path: Path) -> None:
    model = calibrated()
    before = everything(model)
    with pytest.raises(aw.AnywidthError, match="nowhere"):
        aw.save(model, tmp_path / "nowhere" / "network")
    with pytest.raises(aw.AnywidthError, match="No such file"):
        aw.load(model, path)
    aw.save(model, path)
    whole = path.read_bytes()
    for length in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(aw.AnywidthError, match=r"network\.safetensors"):
            aw.load(model, path)
    torch.save(model.state_dict(), path)
    with pytest.raises(aw.AnywidthError, match="pickle"):
        aw.load(model, path)
    save_tensors(path, model.state_dict())
    with pytest.raises(aw.AnywidthError, match=r"anywidth\.save"):
        aw.load(model, path)
    for one, other in zip(before, everything(model), strict=True):
        assert torch.equal(one, other)


def convert_otherwise(**options: object) -> nn.Module:
    example = torch.randn(2, 1, PIXELS, PIXELS)
    model = tiny()
    plan = aw.plan(model, example)
    if "pin" in options:
        plan.pin(str(options.pop("pin")))
    if "divisor" in options:
        plan.set_divisor("0", options.pop("divisor"))  # type: ignore[arg-type]
    return aw.slimmable(model, plan, aw.WidthRange(0.25, 1.0, 4), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: converted(tiny(num_classes=7)), r"9\.bias"),
        (lambda: aw.slimmable(tiny_rgb(), example_input=torch.randn(2, 3, 12, 12)), "lacking"),
        (lambda: converted(low=0.5), "WidthRange"),
        (lambda: convert_otherwise(pin="0"), "'fixed'"),
        (lambda: convert_otherwise(divisor=8), "'divisor'"),
        (lambda: convert_otherwise(average_outputs=True), "average_outputs"),
    ],
)
def test_another_network_or_plan_is_refused(
    path: Path, build: Callable[[], nn.Module], words: str
) -> None:
    aw.save(calibrated(), path)
    other = build()
    before = everything(other)
    with pytest.raises(aw.AnywidthError, match=words):
        aw.load(other, path)
    for one, now in zip(before, everything(other), strict=True):
        assert torch.equal(one, now)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("anywidth", "9", "9"),
        ("plan", "{", "plan"),
        ("plan", '{"version": 1}', "plan"),
        ("average_outputs", "", "read"),
        ("widths", "[1]", "statistics"),
        ("widths", json.dumps([{"width": 0.5, "ready": True, "channels": {}}]), "another"),
    ],
)
def test_a_damaged_description_is_named(path: Path, key: str, value: str, words: str) -> None:
    model = calibrated()
    aw.save(model, path)
    tensors, about = load_tensors(path)
    save_tensors(path, tensors, {**about, key: value})
    with pytest.raises(aw.AnywidthError, match=words):
        aw.load(model, path)


def test_missing_tensors_are_named(path: Path) -> None:
    model = calibrated()
    aw.save(model, path)
    tensors, about = load_tensors(path)
    for gone, words in (("weights/0.weight", r"0\.weight"),
                        ("statistics/1/5.running_var", "'5'")):  # fmt: skip
        save_tensors(path, {n: t for n, t in tensors.items() if n != gone}, about)
        with pytest.raises(aw.AnywidthError, match=words):
            aw.load(model, path)
    assert aw.calibrated_widths(model) == WIDTHS
