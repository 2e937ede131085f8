"""torchvision's models: every layer but the ones that make the output becomes elastic."""

from __future__ import annotations

import pytest
import torch
import torchvision
from agreement import assert_close, configurations
from counting import counted
from torch import nn
from torch.utils._pytree import tree_leaves

import anywidth as aw
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.norm_statistics import uncalibrated_allowed

# Elastic and all convolution and linear layers, and the size of the test image. The others make
# an output: the classifier, and one for each auxiliary head.
MODELS = {
    "alexnet": (7, 8, 64),
    "vgg16_bn": (15, 16, 32),
    "resnet18": (20, 21, 64),
    "resnet50": (53, 54, 64),
    "resnext50_32x4d": (53, 54, 64),
    "wide_resnet50_2": (53, 54, 64),
    "squeezenet1_1": (25, 26, 64),
    "mobilenet_v2": (52, 53, 64),
    "mobilenet_v3_large": (63, 64, 64),
    "mnasnet1_0": (52, 53, 64),
    "efficientnet_b0": (81, 82, 64),
    "efficientnet_v2_s": (170, 171, 64),
    "shufflenet_v2_x1_0": (56, 57, 64),
    "densenet121": (120, 121, 64),
    "googlenet": (61, 64, 64),
    "inception_v3": (96, 98, 299),
    "regnet_y_400mf": (85, 86, 64),
    "convnext_tiny": (58, 59, 64),
    "vit_b_16": (49, 50, 224),
    "swin_t": (52, 53, 64),
    "swin_v2_t": (76, 77, 64),
    "maxvit_t": (150, 151, 224),
    "fcn_resnet50": (54, 55, 64),
    "deeplabv3_resnet50": (60, 61, 64),
}


def build(name: str) -> nn.Module:
    options = {}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    if name in ("fcn_resnet50", "deeplabv3_resnet50"):
        options["weights_backbone"] = None
    return torchvision.models.get_model(name, weights=None, **options)


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    """Converts with nothing pinned; sliced equals extracted; costs equal torch's count."""
    elastic, layers, size = MODELS[name]
    model = build(name).eval()
    image = torch.randn(1, 3, size, size)
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        before = model(image)
    aw.slimmable(model, aw.plan(model, torch.randn(2, 3, size, size)), strict=True)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (elastic, layers)
    assert {key: tensor.shape for key, tensor in model.state_dict().items()} == shapes
    with torch.no_grad(), uncalibrated_allowed(model):
        assert_same_bits(model(image), before)
        for config in configurations(model, count=1):
            small = extract_quietly(model, config)
            with aw.at_width(model, config):
                assert_close(model(image), small(image))
            assert aw.macs(model, config) == counted(small.to("meta"), image.to("meta"))
            assert aw.parameter_count(model, config) == sum(p.numel() for p in small.parameters())


def assert_same_bits(one, other) -> None:
    for first, second in zip(tree_leaves(one), tree_leaves(other), strict=True):
        assert torch.equal(first, second)


def test_fixed_layers_say_why() -> None:
    model = build("googlenet")
    plan = aw.plan(model, torch.randn(2, 3, 64, 64))
    fixed = {g.name for g in plan.groups.values() if g.fixed is not None}
    assert fixed == {"fc", "aux1.fc2", "aux2.fc2"}


def test_folded_mobilenet_with_statistics_of_its_own() -> None:
    images = torch.randn(4, 3, 64, 64)
    model = build("mobilenet_v2")
    aw.slimmable(model, aw.plan(model, images))
    model.train()
    with torch.no_grad():
        for width in (1.0, 0.25):
            with aw.at_width(model, width):
                for _ in range(3):
                    model(images)
        model.eval()
        for width in (1.0, 0.25):
            folded = aw.extract(model, width, fold=True)
            assert not [m for m in folded.modules() if isinstance(m, nn.BatchNorm2d)]
            with aw.at_width(model, width):
                assert_close(model(images), folded(images), 1e-4)


def test_segmentation_with_an_auxiliary_head() -> None:
    model = torchvision.models.segmentation.fcn_resnet50(
        weights=None, weights_backbone=None, aux_loss=True
    )
    aw.slimmable(model, aw.plan(model, torch.randn(2, 3, 64, 64)), strict=True)
    assert aw.plan_of(model).elastic_layers() == (55, 57)
