"""Tensors that a module computes from its weights and keeps: each width computes its own."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agrees, assert_close, convert
from torch import Tensor, nn

import anywidth as aw


class Attention(nn.Module):
    """The biases of attention are looked up once per device, as LeViT does in evaluation mode."""

    def __init__(self, heads: int = 8, side: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(32, heads * 12), nn.Linear(heads * 4, 32)
        self.biases = nn.Parameter(torch.randn(heads, side * side))
        places = torch.arange(side * side)
        self.register_buffer("offsets", (places[:, None] - places).abs(), persistent=False)
        self.looked_up: dict[str, Tensor] = {}
        self.seen: dict[str, Tensor] = {}

    def looked_up_biases(self, device: torch.device) -> Tensor:
        key = str(device)
        if key not in self.looked_up:
            self.looked_up[key] = self.biases[:, self.offsets]
        return self.looked_up[key]

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, self.heads, -1).transpose(1, 2).chunk(3, -1)
        scores = (q @ k.mT + self.looked_up_biases(x.device)).softmax(-1)
        self.seen["scores"] = scores
        return self.out((scores @ v).transpose(1, 2).flatten(2))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), Attention(), nn.Linear(32, 4)).eval()


x = torch.randn(2, 9, 8)


@pytest.mark.parametrize("was_run", [False, True])
def test_what_was_looked_up_at_another_width_is_looked_up_again(was_run: bool) -> None:
    model = network()
    with torch.no_grad():
        before = model(x) if was_run else None
        model = convert(model, x)
        assert aw.extract(model, 0.25)[1].heads == 2
        for width in (1.0, 0.25, 0.5, 0.25, 1.0):
            aw.set_width(model, width)
            assert_close(model(x), aw.extract(model, width)(x))
        if before is not None:
            assert_close(model(x), before, tolerance=0)
    assert_agrees(model, x)


def test_planning_leaves_what_was_looked_up() -> None:
    model = network()
    with torch.no_grad():
        model(x)
    held = model[1].looked_up["cpu"]
    aw.plan(model, x)
    assert model[1].looked_up["cpu"] is held
    fresh = network()
    aw.plan(fresh, x)
    assert not fresh[1].looked_up


def test_features_that_a_module_only_records_can_be_read_after_the_width() -> None:
    model = convert(network(), x)
    with torch.no_grad(), aw.at_width(model, 0.5):
        model(x)
    assert model[1].seen["scores"].shape[1] == 4
