"""Pointwise convolutions with the norm before them and statistics, against PyTorch in float64."""

import pytest
import torch
from interpreter import assert_near
from torch import Tensor
from torch.nn.functional import batch_norm, conv2d, hardswish, relu, relu6, silu

from anywidth.training.gpu import kernels
from anywidth.training.gpu.kernels import batch_norm_small
from anywidth.training.gpu.kernels.shared_buffers import gradients_added_to

ACTIVATIONS = {
    "none": lambda z: z,
    "relu": relu,
    "relu6": relu6,
    "silu": silu,
    "hardswish": hardswish,
}

# (images, channels, height, width), filters used, (filters, channels) of the weight
SHAPES = [
    ((2, 8, 5, 7), 16, (16, 8)),
    ((3, 8, 7, 8), 24, (32, 16)),
    ((1, 33, 13, 11), 67, (70, 40)),
    ((2, 3, 9, 9), 5, (80, 70)),
    ((1, 1, 20, 20), 1, (1, 1)),
    ((1, 72, 4, 4), 130, (136, 80)),
]


class Layers:
    """The parameters of norm, convolution and norm, with running statistics."""

    def __init__(self, weight: tuple[int, int]) -> None:
        made, read = weight
        self.scale = (torch.rand(read) + 0.5).requires_grad_()
        self.shift = torch.randn(read).requires_grad_()
        self.filters = torch.randn(made, read, 1, 1).requires_grad_()
        self.mean, self.var = torch.randn(read), torch.rand(read)
        self.next_mean, self.next_var = torch.randn(made), torch.rand(made)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.scale, self.shift, self.filters]

    @property
    def statistics(self) -> list[Tensor]:
        return [self.mean, self.var, self.next_mean, self.next_var]

    def double(self) -> "Layers":
        other = Layers.__new__(Layers)
        for name, value in vars(self).items():
            exact = value.detach().double()
            setattr(other, name, exact.requires_grad_() if value.requires_grad else exact)
        return other


def _exact(layers: Layers, x: Tensor, made: int, activation: str | None) -> Tensor:
    read = x.shape[1]
    if activation is not None:
        running = layers.mean[:read], layers.var[:read]
        parameters = layers.scale[:read], layers.shift[:read]
        x = batch_norm(x, *running, *parameters, training=True, momentum=0.1, eps=1e-5)
        x = ACTIVATIONS[activation](x)
    y = conv2d(x, layers.filters[:made, :read])
    running = layers.next_mean[:made], layers.next_var[:made]
    # Norms undo what only shifts or scales their input; its gradient would be zero without `y`.
    return torch.cat([y, batch_norm(y, *running, training=True, momentum=0.1, eps=1e-5)], 1)


def _ours(layers: Layers, x: Tensor, made: int, activation: str | None) -> Tensor:
    first = None
    if activation is not None:
        norm = kernels.BatchNorm(layers.scale, layers.shift, activation, layers.mean, layers.var)
        first = kernels.deferred_norm(x, norm)
    y, partial = kernels.pointwise_conv2d_with_statistics(x, layers.filters, made, first)
    assert partial is not None
    ones, zeros = torch.ones_like(layers.next_mean), torch.zeros_like(layers.next_mean)
    running = layers.next_mean, layers.next_var
    norm = kernels.BatchNorm(ones, zeros, "none", *running)
    return torch.cat([y, kernels.batch_norm_act(y, norm, partial)], 1)


def _check(
    shape: tuple[int, ...],
    made: int,
    weight: tuple[int, int],
    activation: str | None = "relu",
    dtype: torch.dtype = torch.float32,
    offset: float = 0.0,
    tolerance: float = 1e-5,
) -> None:
    torch.manual_seed(sum(shape) + made)
    layers = Layers(weight)
    exact_layers = layers.double()
    x = (torch.randn(shape) * torch.rand(1, shape[1], 1, 1) + offset).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    expected = _exact(exact_layers, exact_x, made, activation)
    gradient = torch.randn(expected.shape).to(dtype)
    expected.backward(gradient.double())
    found = _ours(layers, x, made, activation)
    found.backward(gradient)
    assert_near(found, expected, tolerance)
    assert_near(x.grad, exact_x.grad, 3 * tolerance)
    for ours, exact in zip(layers.parameters, exact_layers.parameters, strict=True):
        if exact.grad is None:
            assert ours.grad is None
            continue
        assert_near(ours.grad, exact.grad, 3 * tolerance)
    assert layers.filters.grad is not None
    assert not layers.filters.grad[made:].any()
    assert not layers.filters.grad[:, shape[1] :].any()
    for ours, exact in zip(layers.statistics, exact_layers.statistics, strict=True):
        assert_near(ours, exact, tolerance)


@pytest.fixture(autouse=True)
def _never_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors with few pixels go another way, which these checks are too small not to take."""
    monkeypatch.setattr(batch_norm_small, "MOST_PIXELS", 0)


@pytest.mark.parametrize(("shape", "made", "weight"), SHAPES)
@pytest.mark.parametrize("activation", ["relu", None], ids=["norm", "plain"])
def test_values_gradients_and_statistics(shape, made, weight, activation):
    _check(shape, made, weight, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    _check((2, 8, 6, 5), 12, (16, 16), activation)


def test_half_precision():
    _check((3, 8, 9, 6), 16, (16, 8), dtype=torch.bfloat16, tolerance=3e-2)


def test_a_large_mean_costs_no_digits():
    _check((3, 8, 9, 6), 8, (8, 8), None, offset=300.0, tolerance=2e-3)


def test_gradients_are_added_to_sums_of_the_active_part():
    torch.manual_seed(0)
    layers = Layers((16, 12))
    x = torch.randn(2, 8, 7, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.randn(2, 20, 7, 5)

    def gradients() -> tuple[Tensor | None, ...]:
        y = _ours(layers, x, 10, "relu")
        wanted = (x, *layers.parameters)
        return torch.autograd.grad(y, wanted, gradient, allow_unused=True)

    to_x, *expected = gradients()
    before = [torch.randn(p.shape) for p in layers.parameters]
    sums = [value.clone() for value in before]
    with gradients_added_to(layers.parameters, sums):
        found = gradients()
    assert torch.equal(found[0], to_x)
    assert found[1:] == (None, None, None)
    for total, old, new in zip(sums, before, expected, strict=True):
        assert torch.equal(total, old + new)


def test_a_value_that_is_no_number_stays_one():
    layers = Layers((4, 4))
    x = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    x[0, 0, 0, 0] = float("nan")
    norm = kernels.BatchNorm(layers.scale, layers.shift, "relu")
    y, _ = kernels.pointwise_conv2d_with_statistics(
        x, layers.filters, 4, kernels.deferred_norm(x, norm)
    )
    assert y.isnan().any()


def test_wrong_arguments_are_named():
    x = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    for weight, made, said in (
        (torch.randn(4, 4, 3, 3), 4, r"expected \(filters, channels, 1, 1\)"),
        (torch.randn(4, 3, 1, 1), 4, "expected at most weight's 3"),
        (torch.randn(4, 4, 1, 1), 5, "expected 1 to 4"),
        (torch.randn(257, 4, 1, 1), 5, "expected at most 256"),
        (torch.randn(4, 4, 1, 1, dtype=torch.float64), 4, "expected one of"),
    ):
        assert not kernels.supports_pointwise_conv2d(x, weight, made)
        with pytest.raises(Exception, match=said):
            kernels.pointwise_conv2d_with_statistics(x, weight, made)
