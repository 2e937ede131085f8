"""Attention whose weights are the network's own, given to `multi_head_attention_forward`."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agrees, convert
from torch import Tensor, nn
from torch.nn import functional as F

import anywidth as aw


class Pool(nn.Module):
    """CLIP's attention pool: separate projections, and an output of another size."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(17, 64) / 8)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64) for _ in range(3))
        self.c_proj, self.num_heads = nn.Linear(64, out), 8

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).permute(2, 0, 1)
        x = torch.cat([x.mean(0, keepdim=True), x]) + self.places[:, None]
        biases = [self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]
        return F.multi_head_attention_forward(
            query=x[:1],
            key=x,
            value=x,
            embed_dim_to_check=x.shape[-1],
            num_heads=self.num_heads,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
            in_proj_weight=None,
            in_proj_bias=torch.cat(biases),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True,
            training=self.training,
            need_weights=False,
        )[0].squeeze(0)


class Own(nn.Module):
    """Weights in one parameter, and the sizes in attributes with names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.bias = (
            nn.Parameter(torch.randn(192, 64) / 8),
            nn.Parameter(torch.zeros(192)),
        )
        self.out, self.many, self.wide = nn.Linear(64, 64), 8, 64

    def forward(self, x: Tensor) -> Tensor:
        given = (self.wide, self.many, self.inside, self.bias, None, None, False, 0.0)
        found = F.multi_head_attention_forward(x, x, x, *given, self.out.weight, self.out.bias)
        return x + found[0]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(8, 64), Own(), Own()
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.stem(x.transpose(0, 1)))).mean(0))


@pytest.mark.parametrize("out", [32, 64])
def test_an_attention_pool_narrows_by_whole_heads(out: int) -> None:
    x = torch.rand(2, 3, 16, 16)
    model = convert(nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.ReLU(), Pool(out)), x)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (4, 5)
    assert_agrees(model, x)
    small = aw.extract(model, 0.5)
    assert small[2].num_heads == 4
    assert small[2].c_proj.weight.shape == (out, 32)


def test_attention_with_weights_of_its_own_narrows() -> None:
    x = torch.randn(2, 5, 8)
    model = convert(Words(), x)
    assert aw.plan_of(model).elastic_layers()[0] >= 3
    assert_agrees(model, x)
    small = aw.extract(model, 0.5)
    assert (small.first.many, small.first.wide) == (4, 32)
    assert small.first.inside.shape == (96, 32)
