"""A model of which a part was converted: all that works on a converted network works on it."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_close
from torch import Tensor, nn

import anywidth as aw

WIDTHS = [0.25, 0.5, 1.0]


class Detector(nn.Module):
    """A backbone, and a head with a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 8, 1),
        )  # fmt: skip
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.backbone(images)).relu()).mean((2, 3))


@pytest.fixture(scope="module")
def pristine() -> Detector:
    torch.manual_seed(0)
    model = Detector()
    example = torch.randn(2, 3, 16, 16)
    aw.slimmable(model.backbone, None, aw.WidthRange(0.25, 1.0, 4), example_input=example)
    return model


@pytest.fixture
def model(pristine: Detector) -> Detector:
    return copy.deepcopy(pristine)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(16, 3, 16, 16, generator=generator)
    return images, torch.randint(5, (16,), generator=generator)


def trained(model: Detector) -> Detector:
    step = aw.SandwichStep(model, torch.optim.SGD(model.parameters(), lr=0.05), F.cross_entropy)
    for seed in range(3):
        step(*batch(seed))
    aw.calibrate(model, [batch()], WIDTHS)
    return model.eval()


def test_a_step_equals_a_loop_over_the_widths_of_the_part(model: Detector) -> None:
    other = copy.deepcopy(model).train()
    images, labels = batch()
    aw.SandwichStep(model, None, F.cross_entropy, weights="paper").backward(images, labels)
    teacher = None
    for config in aw.sample_widths(other.backbone, 0):
        with aw.at_width(other.backbone, config):
            logits = other(images)
        if teacher is None:
            loss, teacher = F.cross_entropy(logits, labels), logits.detach()
        else:
            loss = aw.soft_cross_entropy(logits, teacher)
        loss.backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, 0.0)


def test_the_width_of_the_whole_is_that_of_the_part(model: Detector) -> None:
    aw.set_width(model, 0.5)
    assert model.backbone[0].out_channels == 8
    with aw.at_width(model, 0.25) as config:
        assert model.backbone[0].weight.shape[0] == 4
        assert aw.sample_widths(model, 0)[1] == config
    assert model.backbone[0].out_channels == 8
    assert aw.plan_of(model) is aw.plan_of(model.backbone)


def test_norms_around_the_part_have_statistics_by_width(model: Detector) -> None:
    """As what reaches them changes with the width; else all widths would be mixed up in them."""
    aw.set_width(model, 0.5)
    with pytest.raises(aw.AnywidthError, match="calibrate"):
        model.eval()(batch()[0])
    trained(model)
    images = batch()[0]
    for width in WIDTHS:
        with aw.at_width(model, width), torch.no_grad():
            features = model.backbone(images)
            assert_close(model.norm.running_mean, features.mean((0, 2, 3)), 0.02)
    assert aw.calibrated_widths(model) == WIDTHS


@pytest.mark.parametrize("fold", [False, True])
def test_extracted(model: Detector, fold: bool) -> None:
    trained(model)
    images = batch()[0]
    for width in WIDTHS:
        small = aw.extract(model, width, fold=fold)
        assert not any("anywidth" in name for m in small.modules() for name in vars(m))
        with aw.at_width(model, width), torch.no_grad():
            assert_close(small(images), model(images), 1e-5)
    assert small.norm.running_mean is not model.norm._buffers["running_mean"]


def test_kept_in_files_and_copies(model: Detector, pristine: Detector, tmp_path: Path) -> None:
    trained(model)
    file, images = io.BytesIO(), batch()[0]
    torch.save({"model": model.state_dict(), "statistics": aw.statistics_state(model)}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    loaded = copy.deepcopy(pristine).eval()
    loaded.load_state_dict(read["model"])
    aw.load_statistics_state(loaded, read["statistics"])
    aw.save(model, tmp_path / "whole.safetensors")
    from_file = copy.deepcopy(pristine).eval()
    aw.load(from_file, tmp_path / "whole.safetensors")
    others = [loaded, from_file, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for width in WIDTHS:
        with torch.no_grad(), aw.at_width(model, width):
            expected = model(images)
        for other in others:
            with torch.no_grad(), aw.at_width(other, width):
                assert torch.equal(other(images), expected)


def test_what_is_of_a_whole_network_alone_names_the_part(model: Detector) -> None:
    with pytest.raises(aw.AnywidthError, match=r"model\.backbone"):
        aw.macs(model, 0.5)
    with pytest.raises(aw.AnywidthError, match="DataParallel"):
        aw.SandwichStep(nn.DataParallel(model), None, F.cross_entropy)
    with pytest.raises(aw.AnywidthError, match="slimmable"):
        aw.set_width(nn.Linear(2, 2), 0.5)


def test_two_converted_parts_are_named(model: Detector) -> None:
    both = nn.ModuleDict({"left": model, "right": copy.deepcopy(model)})
    with pytest.raises(aw.AnywidthError, match=r"right\.backbone"):
        aw.set_width(both, 0.5)
