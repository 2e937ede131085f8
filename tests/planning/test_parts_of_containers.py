"""Networks that call parts of their containers: `layers[1:]` is a module that nothing holds."""

from __future__ import annotations

import copy

import pytest
import torch
from agreement import active_entries, assert_agrees, assert_gradients, convert
from torch import Tensor, nn

import anywidth as aw

x = torch.randn(2, 3, 4, 4)


def layers() -> nn.Sequential:
    """The norms' numbers of groups follow the width, each in a module that must be found."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU()
    )


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = layers(), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[1:](self.layers[:1](x)))


class SlicedInALoop(Sliced):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.layers)):
            x = self.layers[i : i + 1](x)
        return self.head(x)


class NestedAndShared(Sliced):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.layers[:2]
        self.all = nn.Sequential(self.layers, nn.Sequential(nn.Conv2d(16, 16, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.all[1:](self.all[0][2:](self.first(x))))


class Listed(Sliced):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("kind", [Sliced, SlicedInALoop, NestedAndShared, Listed])
def test_parts_of_containers_are_their_layers(kind: type[nn.Module]) -> None:
    model = kind().eval()
    before = model(x)
    convert(model, x)
    assert torch.equal(model(x), before)
    elastic, layers = aw.plan_of(model).elastic_layers()
    assert elastic == layers - 1
    assert aw.extract(model, 0.5).layers[1].num_groups == 2
    assert_agrees(model, x)
    with aw.at_width(model, 0.5):
        part = model.layers[1:]
        assert part[0] is model.layers[1]
        torch.testing.assert_close(copy.deepcopy(model)(x), model(x))


class Gains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
        self.gains = nn.ParameterList(nn.Parameter(torch.randn(16, 1, 1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x) * self.gains[0]
        for gain in self.gains[1:]:
            y = y * gain
        return self.head(y)


def test_a_slice_of_parameters_is_trained() -> None:
    model = convert(Gains(), x)
    assert_agrees(model, x)
    config = aw.plan_of(model).narrowest
    assert_gradients(model, config, x)
    used = active_entries(aw.plan_of(model), "gains.2", config)
    assert model.gains[2].grad[used].all()
