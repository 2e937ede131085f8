"""Activation checkpointing: gradients are those without it, wherever backward is called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anywidth as aw

Gradients = list[Tensor]


class Residual(nn.Module):
    """Blocks that narrow inside; what goes in and out of them has the same shape at all widths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
            for _ in range(2)
        )
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + run(block, x, self.reentrant)
        return x


def run(module: nn.Module, x: Tensor, reentrant: bool | None) -> Any:
    return module(x) if reentrant is None else checkpoint(module, x, use_reentrant=reentrant)


class Wrapped(nn.Module):
    """Checkpoints a converted network as a whole, as a detector may its backbone."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        return 2 * run(self.backbone, x, self.reentrant)


def own_loop(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for config in aw.sample_widths(model, 0):
        with aw.at_width(model, config):
            loss = F.cross_entropy(model(x), y)
        loss.backward()


def one_backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    losses = []
    for width in (0.25, 0.5, 1.0, 0.75):
        aw.set_width(model, width)
        losses.append(F.cross_entropy(model(x), y))
    aw.set_width(model, 1.0)
    sum(losses).backward()  # type: ignore[union-attr]


def sandwich(model: nn.Module, x: Tensor, y: Tensor) -> None:
    aw.SandwichStep(model, None, F.cross_entropy).backward(x, y)


@pytest.fixture(scope="module")
def converted() -> nn.Module:
    torch.manual_seed(0)
    widths = aw.WidthRange(0.25, 1.0, 2)
    return aw.slimmable(Residual(), None, widths, example_input=torch.randn(2, 6))


@pytest.mark.parametrize("loop", [own_loop, one_backward, sandwich])
@pytest.mark.parametrize("part", ["blocks", "whole"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_those_without_checkpoints(
    converted: nn.Module, loop: Callable[..., None], part: str, reentrant: bool
) -> None:
    x, y = torch.randn(8, 6, requires_grad=True), torch.randint(6, (8,))
    found: list[Gradients] = []
    for setting in (None, reentrant):
        model: Any = copy.deepcopy(converted).train()
        if part == "whole":
            model = Wrapped(model)
        model.reentrant = setting
        loop(model, x, y)

        layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
        assert layer.out_features == 16, "the width was not set back"
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == 12
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_a_failed_backward_leaves_the_width_as_it_was(converted: nn.Module) -> None:
    model: Any = copy.deepcopy(converted).train()
    x = torch.randn(8, 6, requires_grad=True)

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("out of memory")

    x.register_hook(fail)
    with aw.at_width(model, 0.5):
        output = model(x)
    with pytest.raises(RuntimeError, match="memory"):
        output.sum().backward()
    assert model(x.detach()).shape == (8, 6)
    assert model.blocks[0][0].weight.shape == (16, 6)


def test_no_hook_is_left_in_extracted_networks(converted: nn.Module) -> None:
    small = aw.extract(converted, 1.0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in small.modules())
