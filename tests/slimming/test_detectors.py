"""torchvision's detectors, converted by their parts: all that works on a network works on them."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import anywidth_runtime
import pytest
import torch
from agreement import assert_close
from tiny_detectors import DETECTORS, IMAGES, TARGETS, built
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

import anywidth as aw

WIDTHS = [0.25, 0.5, 1.0]
# The share of the multiply-adds that may be left at width 0.25, if it is more than in the others:
# outputs stay whole, which small networks show most.
LEFT = {"SSD": 0.2, "SSDlite": 0.16}


@pytest.fixture(scope="module", params=list(DETECTORS))
def planned(request: pytest.FixtureRequest) -> tuple[str, nn.Module, aw.Plan]:
    model = built(request.param)
    plan = aw.plan(model, IMAGES, parts=DETECTORS[request.param][1])
    return request.param, model, plan


def converted(planned: tuple[str, nn.Module, aw.Plan]) -> nn.Module:
    _, model, plan = planned
    return aw.slimmable(copy.deepcopy(model), plan, aw.WidthRange(divisor=4), strict=True)


@torch.no_grad()
def detected(model: nn.Module) -> Any:
    return model(IMAGES)


def loss(losses: dict[str, torch.Tensor], _: Any) -> torch.Tensor:
    return torch.stack(list(losses.values())).sum()


def test_a_detector_narrows_trains_and_is_extracted(
    planned: tuple[str, nn.Module, aw.Plan],
) -> None:
    name, plain, plan = planned
    before = detected(plain)
    assert all(len(one["boxes"]) for one in before)
    model = converted(planned)
    assert_close(detected(model), before, 0.0)

    assert plan.elastic_share() > 0.95
    left = aw.macs(aw.plan_of(model), 0.25) / aw.macs(aw.plan_of(model), 1.0)
    assert left < LEFT.get(name, 0.09)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = aw.SandwichStep(model.train(), optimizer, loss, None)
    losses = step((IMAGES, TARGETS)).losses
    assert all(torch.isfinite(one) for one in losses)
    assert len({one.item() for one in losses}) > 2  # widths differ

    aw.calibrate(model, [IMAGES], WIDTHS, forward=lambda network, images: network(images))
    model.eval()
    for width in WIDTHS:
        small = aw.extract(model, width)
        with aw.at_width(model, width):
            assert_close(detected(small), detected(model))
    folded = aw.extract(model, 0.25, fold=True)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.backbone.modules())


def test_the_pyramid_narrows_if_parts_alone_read_it() -> None:
    build, parts = DETECTORS["Faster R-CNN"]
    pyramid = "backbone.fpn.layer_blocks.0.0"
    assert aw.plan(build().eval(), IMAGES, parts=parts).group_of(pyramid).fixed is None
    model = build().eval()
    plan = aw.plan(model, IMAGES, parts=[part for part in parts if "pool" not in part])
    assert "outside the parts" in (plan.group_of(pyramid).fixed or "")
    # The predictor is still given what the head makes, and nothing else reads it.
    assert plan.group_of("roi_heads.box_head.fc7").fixed is None
    aw.slimmable(model, plan, strict=True)


def test_a_backbone_alone_keeps_what_the_rest_reads() -> None:
    model = built("RetinaNet")
    plan = aw.plan(model, IMAGES, parts=["backbone"])
    assert plan.group_of("backbone.fpn.layer_blocks.0.0").fixed is not None
    assert plan.group_of("backbone.body.a.0").fixed is None
    assert 0.05 < plan.elastic_share() < 0.6  # the head counts too
    with pytest.warns(UserWarning, match="read outside the parts"):
        aw.slimmable(model, plan)
    assert_close(detected(model), detected(built("RetinaNet")), 0.0)


def test_multiply_adds_are_those_of_one_image_and_count_the_rest() -> None:
    model = built("RetinaNet")
    both = aw.plan(model, IMAGES, parts=["backbone", "head"])
    backbone = aw.plan(model, IMAGES[:1], parts=["backbone"])
    assert aw.macs(both, 1.0) == pytest.approx(aw.macs(backbone, 1.0), rel=1e-3)


def test_an_error_says_which_parts_to_plan() -> None:
    parts = DETECTORS["Faster R-CNN"][1]
    with pytest.raises(aw.AnywidthError) as caught:
        aw.plan(built("Faster R-CNN"), IMAGES)
    assert f"anywidth.plan(model, example_input, parts={parts})" in str(caught.value)


def test_parts_of_a_detector_are_found() -> None:
    assert aw.plan(built("RetinaNet"), IMAGES, parts="auto").parts == ["backbone", "head"]


def test_plans_and_networks_are_saved_pickled_and_copied(tmp_path: Path) -> None:
    model = built("FCOS")
    plan = aw.plan(model, IMAGES, parts=["backbone", "head"])
    saved = json.loads(json.dumps(plan.to_json()))
    again = aw.Plan.from_json(saved)
    assert again == plan
    assert again.given is None

    aw.slimmable(model, again)  # with images like those of the example
    aw.calibrate(model, [IMAGES], WIDTHS, forward=lambda network, images: network(images))
    aw.set_width(model, 0.5)
    expected = detected(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), aw.replica(model)):
        assert_close(detected(other), expected, 0.0)
    aw.save(model, tmp_path / "detector.safetensors")
    fresh = aw.slimmable(built("FCOS").train(), again).eval()
    aw.load(fresh, tmp_path / "detector.safetensors")
    with aw.at_width(fresh, 0.5):
        assert_close(detected(fresh), expected, 0.0)
    assert aw.latency(model, 0.25, repeats=1, warmup=0).median > 0


class Raw(nn.Module):
    """A detector without the choice of boxes."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.head(list(self.backbone(images).values()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_bundle_holds_the_parts_of_a_detector(tmp_path: Path) -> None:
    model = built("SSD")
    aw.slimmable(model, aw.plan(model, IMAGES, parts=["backbone", "head"]))
    options = {"measure_latency": False, "progress": False}
    with pytest.raises(aw.AnywidthError, match="wrap"):
        aw.export_bundle(model, tmp_path / "whole.anywidth", [0.25], **options)
    images = torch.stack(IMAGES)
    aw.export_bundle(
        model, tmp_path / "raw.anywidth", [0.25], example_input=images, wrap=Raw, **options
    )
    found = anywidth_runtime.open(tmp_path / "raw.anywidth").run(images.numpy(), width=0.25)
    with aw.at_width(model, 0.25), torch.no_grad():
        expected = Raw(model)(images)
    for one, other in zip(found.values(), expected.values(), strict=True):
        assert_close(torch.from_numpy(one), other, 1e-4)


def test_frozen_norms_are_noted() -> None:
    """Their statistics would be those of the full width at every width."""
    model = built("SSD")
    norm = FrozenBatchNorm2d(16)
    model.backbone.first[0][1] = norm
    plan = aw.plan(model, IMAGES, parts=["backbone", "head"])
    assert any("frozen" in note and "backbone.first.0.1" in note for note in plan.notes)
    aw.slimmable(model, plan, strict=True)


def test_channels_of_a_detector_are_sorted() -> None:
    model = built("RetinaNet")
    plan = aw.plan(model, IMAGES, parts=["backbone", "head"])
    before = model.head.regression_head.conv[0][0].weight.clone()
    with torch.no_grad():
        boxes = model.head(list(model.backbone(torch.stack(IMAGES)).values()))
        aw.sort_channels(model, plan)
        assert_close(model.head(list(model.backbone(torch.stack(IMAGES)).values())), boxes)
    assert not torch.equal(model.head.regression_head.conv[0][0].weight, before)
