from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import anywidth as aw


@pytest.mark.parametrize("multiplier", [0.35, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("make", [aw.models.mobilenet_v1, aw.models.mobilenet_v2])
def test_a_multiplied_network_is_the_published_one_at_that_width(
    make: Callable[..., nn.Module], multiplier: float
) -> None:
    example = torch.randn(2, 3, 32, 32)
    plan = aw.plan(make(), example)
    small = aw.plan(make(multiplier=multiplier), example)
    assert aw.macs(small, 1.0) == aw.macs(plan, multiplier)


@pytest.mark.parametrize("multiplier", [0, -0.5, 1.5])
def test_a_multiplier_is_a_share(multiplier: float) -> None:
    with pytest.raises(aw.AnywidthError, match="multiplier"):
        aw.models.mobilenet_v1(multiplier=multiplier)
