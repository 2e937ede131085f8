"""What narrows, and what it costs, does not depend on how many examples a plan is made with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

import anywidth as aw


class State(nn.Module):
    """Zeros of (batch, state), which may be as many."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 8
        self.stem, self.state, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), self.size)
        for step in self.stem(x).unbind(1):
            state = torch.tanh(step + self.state(state))
        return self.head(state)


def swin() -> nn.Module:
    kinds = torchvision.models.swin_transformer
    return torchvision.models.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2],
        num_heads=[2],
        window_size=[4, 4],
        num_classes=3,
        block=kinds.SwinTransformerBlockV2,
        downsample_layer=kinds.PatchMergingV2,
    )


@pytest.mark.parametrize(("build", "shape"), [(swin, (3, 32, 32)), (State, (5, 4))])
def test_plans_agree(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    plans = [aw.plan(build().eval(), torch.randn(batch, *shape)) for batch in (2, 4, 8)]
    elastic, layers = plans[0].elastic_layers()
    assert layers - elastic == 1
    assert len({plan.elastic_layers() for plan in plans}) == 1
    for width in (1.0, 0.5):
        assert len({aw.macs(plan, width) for plan in plans}) == 1
