"""A batch norm done by the depthwise convolution after it, against PyTorch in float64."""

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
MORE = 3  # channels of the parameters that are not active

# kernel size, stride, padding, (images, channels, height, width)
SHAPES = [
    (3, 1, 1, (2, 3, 5, 7)),
    (3, 1, 1, (3, 8, 7, 8)),
    (3, 1, 1, (1, 33, 4, 5)),
    (3, 1, 1, (37, 4, 2, 4)),
    (3, 1, 1, (1, 4, 19, 3)),
    (3, 1, 0, (2, 6, 5, 5)),
    (3, 2, 1, (2, 8, 8, 7)),
    (3, 2, 1, (1, 20, 5, 8)),
    (3, 2, 1, (1, 4, 37, 3)),
    (3, 2, 2, (2, 6, 5, 6)),
    (5, 1, 2, (1, 8, 8, 3)),
    (5, 2, 2, (1, 12, 7, 8)),
    (5, 2, 1, (1, 6, 6, 7)),
]


class Layers:
    """The parameters of norm, convolution and norm, with running statistics."""

    def __init__(self, channels: int, kernel: int, dtype: torch.dtype = torch.float32) -> None:
        size = channels + MORE
        self.scale = (torch.rand(size) + 0.5).to(dtype).requires_grad_()
        self.shift = torch.randn(size).to(dtype).requires_grad_()
        self.filters = torch.randn(size, 1, kernel, kernel).to(dtype).requires_grad_()
        self.mean, self.var = torch.randn(size).to(dtype), torch.rand(size).to(dtype)
        self.next_mean, self.next_var = torch.randn(size).to(dtype), torch.rand(size).to(dtype)

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


def _exact(layers: Layers, x: Tensor, stride: int, padding: int, activation: str) -> Tensor:
    channels = x.shape[1]
    parameters = layers.scale[:channels], layers.shift[:channels]
    running = layers.mean[:channels], layers.var[:channels]
    z = batch_norm(x, *running, *parameters, training=True, momentum=0.1, eps=1e-5)
    y = conv2d(
        ACTIVATIONS[activation](z),
        layers.filters[:channels],
        stride=stride,
        padding=padding,
        groups=channels,
    )
    running = layers.next_mean[:channels], layers.next_var[:channels]
    return batch_norm(y, *running, training=True, momentum=0.1, eps=1e-5)


def _ours(layers: Layers, x: Tensor, stride: int, padding: int, activation: str) -> Tensor:
    norm = kernels.BatchNorm(layers.scale, layers.shift, activation, layers.mean, layers.var)
    first = kernels.deferred_norm(x, norm)
    y, partial = kernels.depthwise_conv2d_with_statistics(x, layers.filters, stride, padding, first)
    ones, zeros = torch.ones_like(layers.mean), torch.zeros_like(layers.mean)
    running = layers.next_mean, layers.next_var
    return kernels.batch_norm_act(y, kernels.BatchNorm(ones, zeros, "none", *running), partial)


def _check(
    shape: tuple[int, ...],
    kernel: int,
    stride: int,
    padding: int,
    activation: str = "relu",
    dtype: torch.dtype = torch.float32,
    offset: float = 0.0,
    tolerance: float = 1e-5,
) -> None:
    torch.manual_seed(sum(shape) + kernel)
    layers = Layers(shape[1], kernel)
    exact_layers = layers.double()
    x = (torch.randn(shape) * torch.rand(1, shape[1], 1, 1) + offset).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    expected = _exact(exact_layers, exact_x, stride, padding, activation)
    gradient = torch.randn(expected.shape).to(dtype)
    expected.backward(gradient.double())
    found = _ours(layers, x, stride, padding, activation)
    found.backward(gradient)
    assert_near(found, expected, tolerance)
    assert_near(x.grad, exact_x.grad, 3 * tolerance)
    for ours, exact in zip(layers.parameters, exact_layers.parameters, strict=True):
        assert_near(ours.grad, exact.grad, 3 * tolerance)
        assert not ours.grad[shape[1] :].any()
    for ours, exact in zip(layers.statistics, exact_layers.statistics, strict=True):
        assert_near(ours, exact, tolerance)


@pytest.fixture(autouse=True)
def _never_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors with few pixels go another way, which these checks are too small not to take."""
    monkeypatch.setattr(batch_norm_small, "MOST_PIXELS", 0)


@pytest.mark.parametrize(("kernel", "stride", "padding", "shape"), SHAPES)
def test_values_gradients_and_statistics(kernel, stride, padding, shape):
    _check(shape, kernel, stride, padding)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    _check((2, 8, 6, 5), 3, 1, 1, activation)


def test_half_precision():
    _check((3, 8, 9, 6), 3, 1, 1, dtype=torch.bfloat16, tolerance=3e-2)


def test_a_large_mean_costs_no_digits():
    _check((3, 8, 9, 6), 3, 1, 1, "none", offset=300.0, tolerance=2e-3)


def test_gradients_are_added_to_sums_of_the_active_channels():
    torch.manual_seed(0)
    layers = Layers(8, 3)
    x = torch.randn(2, 8, 7, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.randn(2, 8, 7, 5)

    def gradients() -> tuple[Tensor | None, ...]:
        y = _ours(layers, x, 1, 1, "relu")
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


def test_everything_is_the_same_every_time():
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = Layers(4, 3)
        x = torch.randn(37, 4, 6, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
        _ours(layers, x, 1, 1, "silu").square().sum().backward()
        results.append([x.grad, *(p.grad for p in layers.parameters), *layers.statistics])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
