"""Random small networks: sliced equals extracted at random nonuniform configurations."""

from __future__ import annotations

import torch
from agreement import assert_agrees, assert_gradients, configurations, convert, stir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import anywidth as aw


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, height, width = x.shape
    x = x.view(batch, groups, channels // groups, height, width)
    return x.transpose(1, 2).reshape(batch, channels, height, width)


class Block(nn.Module):
    """One of the ways channels meet, drawn by name; keeps the channel count unless it joins."""

    def __init__(self, kind: str, channels: int, more: int) -> None:
        super().__init__()
        self.kind, self.out = kind, channels
        conv = lambda i, o, **options: nn.Conv2d(i, o, 3, padding=1, **options)  # noqa: E731
        if kind in ("residual", "concatenation"):
            self.inner, self.norm = conv(channels, more), nn.BatchNorm2d(more)
            self.back = conv(more, channels)
            self.out = channels if kind == "residual" else channels + more
        elif kind == "chunks":
            self.inner = conv(channels // 2, channels // 2)
        elif kind == "gate":
            self.value, self.gate = conv(channels, more), conv(channels, more)
            self.out = more
        elif kind == "glu":
            self.inner = conv(channels, 2 * more)
            self.out = more
        elif kind == "depthwise":
            self.inner, self.norm = conv(channels, channels, groups=channels), nn.PReLU(channels)
        elif kind == "squeeze":
            self.down, self.up = nn.Linear(channels, 4), nn.Linear(4, channels)
        elif kind == "plain":
            self.inner, self.norm = conv(channels, more), nn.GroupNorm(2, more)
            self.out = more

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "residual":
            return x + self.back(torch.relu(self.norm(self.inner(x))))
        if self.kind == "concatenation":
            return torch.cat([torch.relu(self.norm(self.inner(x))), x], 1)
        if self.kind == "chunks":
            first, second = x.chunk(2, 1)
            return torch.cat([self.inner(second), first], 1)
        if self.kind == "shuffle":
            return channel_shuffle(x, 2)
        if self.kind == "gate":
            return self.value(x) * torch.sigmoid(self.gate(x))
        if self.kind == "glu":
            return nn.functional.glu(self.inner(x), 1)
        if self.kind == "squeeze":
            return x * self.up(torch.relu(self.down(x.mean((2, 3))))).sigmoid()[..., None, None]
        return self.norm(self.inner(x))


KINDS = ["residual", "concatenation", "chunks", "shuffle", "gate", "glu", "depthwise", "squeeze",
         "plain"]  # fmt: skip


def build(draws: list[tuple[str, int]], flat: bool) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    channels = 8
    for kind, more in draws:
        layers.append(Block(kind, channels, more))
        channels = layers[-1].out
    if flat:
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 3)]
    else:
        layers.append(nn.Conv2d(channels, 3, 1))
    return nn.Sequential(*layers)


networks = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([4, 8, 12])), min_size=1,
                    max_size=4)  # fmt: skip


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(networks, st.booleans(), st.integers(1, 2))
def test_random_networks(draws: list[tuple[str, int]], flat: bool, divisor: int) -> None:
    torch.manual_seed(len(draws))
    x = torch.randn(3, 3, 6, 6)
    model = build(draws, flat)
    before = model.eval()(x)
    convert(model, x, aw.WidthRange(0.25, 1.0, divisor))
    assert torch.equal(model.eval()(x), before)
    fixed = [group.fixed for group in aw.plan_of(model).groups.values() if group.fixed]
    assert sum("output" in reason for reason in fixed) == 1
    assert all("output" in reason or "unit" in reason for reason in fixed)
    stir(model, [x], batches=1)
    assert_agrees(model, x)
    for config in configurations(model, count=1, seed=len(draws)):
        assert_gradients(model, config, x)
