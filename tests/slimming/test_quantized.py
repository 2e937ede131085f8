"""Networks prepared for training with quantization: their observers write what they see."""

from __future__ import annotations

import warnings

import pytest
import torch
from agreement import configurations
from torch import Tensor, nn

import anywidth as aw
from anywidth.slimming.extraction import extract_quietly

IMAGES = torch.randn(4, 3, 8, 8)


class Observed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given = torch.ao.quantization.QuantStub()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.given(x)).relu()).mean((2, 3)))


def prepared() -> nn.Module:
    model = Observed().train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this way to quantize is old
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        return torch.ao.quantization.prepare_qat(model)


def test_observers_are_not_taken_for_chance() -> None:
    model = prepared()
    model(IMAGES)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    aw.slimmable(model, None, aw.WidthRange(0.25, 1.0, 4), example_input=IMAGES, strict=True)
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    for observer in model.modules():
        if isinstance(observer, torch.ao.quantization.FakeQuantize):
            observer.disable_observer()
    with torch.no_grad():
        for config in configurations(model):
            small = extract_quietly(model, config)
            with aw.at_width(model, config):
                torch.testing.assert_close(model(IMAGES), small(IMAGES))


def test_observers_that_saw_nothing_are_to_see_something_first() -> None:
    with pytest.raises(aw.AnywidthError, match="run the network once"):
        aw.slimmable(prepared(), example_input=IMAGES)
