"""Spectral norm at other widths: a weight is divided by the largest singular value of its part."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from agreement import assert_agrees, convert
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import anywidth as aw

x = torch.randn(4, 3, 8, 8)
Norm = Callable[[nn.Module], nn.Module]
both = pytest.mark.parametrize("norm", [nn.utils.spectral_norm, parametrizations.spectral_norm])


class Joined(nn.Module):
    """The last layer reads parts of two others, so its active inputs are no first ones."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.one, self.two = norm(nn.Conv2d(3, 16, 3)), norm(nn.Conv2d(3, 16, 3))
        self.back = norm(nn.ConvTranspose2d(32, 16, 3))
        self.head = norm(nn.Conv2d(16, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.one(x), self.two(x)], 1).relu()
        return self.head(self.back(joined).relu())


def trained(norm: Norm) -> nn.Module:
    """A network whose vectors belong to its weights, as after training."""
    torch.manual_seed(0)
    model = Joined(norm).train()
    for _ in range(30):
        model(x)
    return model.eval()


def largest(weight: Tensor, dim: int = 0) -> float:
    return float(torch.linalg.matrix_norm(weight.detach().movedim(dim, 0).flatten(1), 2))


@both
def test_a_narrow_weight_is_divided_by_its_own_singular_value(norm: Norm) -> None:
    model = trained(norm)
    before = model(x)
    convert(model, x)
    assert torch.equal(model(x), before)
    assert aw.plan_of(model).elastic_layers() == (3, 4)
    assert_agrees(model, x)
    for width in (0.25, 0.5, 0.75):
        small = aw.extract(model, width)
        for layer, dim in ((small.one, 0), (small.two, 0), (small.back, 1), (small.head, 0)):
            assert largest(layer.weight, dim) == pytest.approx(1, abs=0.01)


@both
def test_training_narrow_leaves_the_vectors_of_the_whole_weight(norm: Norm) -> None:
    model = trained(norm)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = model(x)
    convert(model, x).train()
    with aw.at_width(model, 0.25):
        model(x).sum().backward()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    assert torch.equal(model.eval()(x), expected)


@both
def test_an_extracted_network_trains_with_vectors_of_its_own(norm: Norm) -> None:
    model = convert(trained(norm), x)
    small = aw.extract(model, 0.5)
    before = small(x)
    small.train()(x).sum().backward()
    torch.testing.assert_close(small.eval()(x), before, rtol=0.05, atol=0.05)
    assert torch.equal(aw.extract(model, 1.0)(x), model(x))


def test_vectors_without_an_active_entry_give_numbers() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(16, 16))
    model = nn.Sequential(nn.Linear(3, 16), layer, nn.Linear(16, 2))
    norm = layer.parametrizations.weight[0]
    with torch.no_grad():
        for vector in (norm._u, norm._v):
            vector.zero_()[-1] = 1
        layer.parametrizations.weight.original[-1, -1] = 9
    convert(model.eval(), torch.randn(4, 3))
    with aw.at_width(model, 0.25):
        assert model(torch.randn(4, 3)).isfinite().all()
        assert largest(layer.weight) == pytest.approx(1, abs=0.01)


def test_copies_and_steps_before_the_norm_agree() -> None:
    """A parametrization may come first: the norm is that of what it gives."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model = nn.Sequential(nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 2))
    parametrize.register_parametrization(model[1], "weight", Doubled())
    parametrizations.spectral_norm(model[1])
    given = torch.randn(4, 3)
    convert(model.eval(), given)
    assert_agrees(model, given)
    with aw.at_width(model, 0.5):
        torch.testing.assert_close(copy.deepcopy(model)(given), model(given))
        assert largest(model[1].weight) == pytest.approx(1, abs=0.01)
