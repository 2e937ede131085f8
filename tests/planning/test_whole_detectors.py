"""Detectors made of transformers, and optical flow: these are planned as a whole."""

from __future__ import annotations

import pytest
import torch
import torchvision
import transformers
from agreement import convert
from torch import nn
from torch.utils._pytree import tree_leaves

import anywidth as aw

RESNET = {
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
SIZES = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "d_model": 32,
    "num_queries": 6,
    "num_labels": 4,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
MAPS = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [16, 32, 32],
    "decoder_in_channels": [32, 32, 32],
    "num_denoising": 0,
}


def detr() -> nn.Module:
    body = transformers.ResNetConfig(**RESNET, out_features=["stage4"])
    config = transformers.DetrConfig(backbone_config=body, **SIZES)
    return transformers.DetrForObjectDetection(config)


def rt_detr() -> nn.Module:
    stages = ["stage2", "stage3", "stage4"]
    body = transformers.RTDetrResNetConfig(**RESNET, out_features=stages)
    config = transformers.RTDetrConfig(backbone_config=body, **SIZES, **MAPS)
    return transformers.RTDetrForObjectDetection(config)


@pytest.mark.parametrize(("build", "left"), [(detr, 0.25), (rt_detr, 0.2)])
def test_a_transformer_finds_boxes_at_every_width(build, left: float) -> None:
    images = torch.rand(2, 3, 64, 64)
    model = build().eval()
    with torch.no_grad():
        before = model(images)
        convert(model, images)  # which compares sliced and extracted
        after = model(images)
        assert torch.equal(after.pred_boxes, before.pred_boxes)
        with aw.at_width(model, 0.25):
            assert model(images).pred_boxes.shape == before.pred_boxes.shape
    plan = aw.plan_of(model)
    assert plan.elastic_share() > 0.95
    assert aw.macs(plan, 0.25) / aw.macs(plan, 1.0) < left


def test_flow_between_images() -> None:
    model = torchvision.models.optical_flow.raft_small(weights=None).eval()
    pair = (torch.rand(2, 3, 128, 128), torch.rand(2, 3, 128, 128), 2)
    with torch.no_grad():
        before = model(*pair)
        convert(model, pair)
        for one, other in zip(tree_leaves(before), tree_leaves(model(*pair)), strict=True):
            assert torch.equal(one, other)
    plan = aw.plan_of(model)
    assert plan.elastic_share() > 0.95
    # The states of its recurrent layers stay whole: they are cut out of the context by a number.
    assert aw.macs(plan, 0.25) / aw.macs(plan, 1.0) < 0.5
