"""Checkpoints stay plain: the keys and shapes of the unconverted model, at every width."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
from torchvision import models

import anywidth as aw

# Swin in small: its export takes most of the time.
SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
BUILDERS = {
    **{name: getattr(models, name) for name in ("resnet18", "mobilenet_v2", "shufflenet_v2_x1_0")},
    "swin": partial(models.SwinTransformer, [4, 4], window_size=[7, 7], **SWIN),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_checkpoint_of_torchvision_loads_after_conversion(name: str) -> None:
    images = torch.randn(2, 3, 64, 64)
    plain = BUILDERS[name]().eval()
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    model = BUILDERS[name]().eval()
    aw.slimmable(model, aw.plan(model, images), verified=name == "swin")
    aw.set_width(model, 0.25)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(torch.load(file, weights_only=True), strict=True)
    aw.set_width(model, 1.0)
    with torch.no_grad():
        assert torch.equal(model(images), plain(images))


def test_state_dict_is_whole_and_shares_memory_at_a_narrow_width() -> None:
    model = aw.models.mobilenet_v1(total_stride=8)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    aw.slimmable(model, aw.plan(model, torch.randn(2, 3, 32, 32)), verified=False)
    with aw.at_width(model, 0.25):
        saved = model.state_dict()
        assert {key: value.shape for key, value in saved.items()} == shapes
        assert all(saved[k].data_ptr() == p.data_ptr() for k, p in model.named_parameters())
