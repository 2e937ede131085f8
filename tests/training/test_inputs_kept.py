"""A network that changes its input in place would give each width another batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_networks import PIXELS, images_and_labels, tiny
from torch import Tensor, nn

import anywidth as aw


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = tiny()

    def forward(self, images: Tensor) -> Tensor:
        images -= 0.5
        return self.network(images)


def centred() -> nn.Module:
    torch.manual_seed(0)
    example = torch.randn(2, 1, PIXELS, PIXELS)
    widths = aw.WidthRange(0.25, 1.0, 4)
    return aw.slimmable(Centred(), None, widths, example_input=example, verified=False)


def test_a_step_refuses_it() -> None:
    model = centred()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(aw.AnywidthError, match="in place"):
        aw.SandwichStep(model, optimizer, F.cross_entropy)(*images_and_labels(8))
    torch.testing.assert_close(list(model.parameters()), before)


def test_calibration_refuses_it() -> None:
    model = centred()
    images, _ = images_and_labels(8)
    with pytest.raises(aw.AnywidthError, match="in place"):
        aw.calibrate(model, [images], [0.25, 0.5])
    with pytest.raises(aw.AnywidthError, match="in place"):
        aw.calibrate(model, [images], [0.25], forward=lambda model, batch: model(batch))
    assert aw.calibrated_widths(model) == [1.0]
