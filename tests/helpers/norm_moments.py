"""Means and variances that a network's batch norms use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import anywidth as aw

Moments = list[tuple[Tensor, Tensor]]


def known(model: nn.Module, width: float | aw.ChannelConfig) -> Moments:
    """The statistics that evaluation at a width uses."""
    model.eval()
    with aw.at_width(model, width):
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        return [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]


def assert_moments(found: Moments, expected: Moments) -> None:
    for (mean, var), (expected_mean, expected_var) in zip(found, expected, strict=True):
        torch.testing.assert_close(mean.double(), expected_mean.double(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(var.double(), expected_var.double(), atol=1e-5, rtol=1e-5)
