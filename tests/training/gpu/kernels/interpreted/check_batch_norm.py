"""Batch norm and activation against PyTorch in float64: values, gradients, statistics."""

import pytest
import torch
from interpreter import assert_near
from torch import Tensor
from torch.nn import functional

from anywidth.training.gpu.kernels import (
    ACTIVATIONS,
    BatchNorm,
    batch_norm_act,
    batch_norm_act_with_statistics,
)
from anywidth.training.gpu.kernels.shared_buffers import gradients_added_to

TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
ALL_CHANNELS = 80
EPS = 1e-5
MOMENTUM = 0.3

# images, channels, height, width
SHAPES = [
    (5, 1, 1, 1),
    (7, 3, 1, 5),
    (3, 8, 7, 5),
    (5, 20, 5, 8),
    (4, 33, 7, 7),
    (9, 72, 8, 7),
    # Several partial sums, each over several blocks of rows.
    (24, 64, 7, 7),
    # More than one block of rows of the kernels for few pixels.
    (43, 9, 5, 5),
]


@pytest.fixture(autouse=True, params=["small", "large"])
def path(request, monkeypatch):
    """Both the kernels for few pixels and those that share the pixels out."""
    if request.param == "large":
        monkeypatch.setattr("anywidth.training.gpu.kernels.batch_norm_small.MOST_PIXELS", 0)


def _activation(name: str):
    return (lambda z: z) if name == "none" else getattr(functional, name)


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(sum(shape))
    x = (2 * torch.randn(shape) + 3).to(dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(ALL_CHANNELS, requires_grad=True)
    bias = (2 * torch.randn(ALL_CHANNELS)).requires_grad_()
    return x.requires_grad_(), weight, bias


def _check(x: Tensor, weight: Tensor, bias: Tensor, activation: str, view: bool = False) -> None:
    channels = x.shape[1]
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    normalized = functional.batch_norm(
        exact[0], None, None, exact[1][:channels], exact[2][:channels], True, 0.0, EPS
    )
    expected = _activation(activation)(normalized)
    gradient = torch.randn(expected.shape).to(x.dtype)
    expected.backward(gradient.double())

    given = (weight[:channels], bias[:channels]) if view else (weight, bias)
    y = batch_norm_act(x, BatchNorm(*given, activation, eps=EPS))
    y.backward(gradient)
    tolerance = TOLERANCE[x.dtype]
    assert y.dtype == x.dtype
    assert_near(y, expected, tolerance)
    assert_near(x.grad, exact[0].grad, tolerance)
    assert_near(weight.grad, exact[1].grad, 4e-6)
    assert_near(bias.grad, exact[2].grad, 4e-6)
    assert not weight.grad[channels:].any()
    assert not bias.grad[channels:].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape):
    _check(*_inputs(shape, torch.float32), "relu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_activations(activation, dtype):
    _check(*_inputs((4, 24, 5, 5), dtype), activation)


def test_a_view_of_the_parameters_gets_its_gradient_through_the_slice():
    _check(*_inputs((4, 24, 5, 5), torch.float32), "relu6", view=True)


@pytest.mark.parametrize("shape", [(4, 24, 5, 5), (5, 72, 3, 3)])
def test_gradients_are_added_to_sums_of_the_active_channels(shape):
    x, weight, bias = _inputs(shape, torch.float32)
    gradient = torch.randn(shape)

    def gradients():
        y = batch_norm_act(x, BatchNorm(weight, bias, "relu", eps=EPS))
        return torch.autograd.grad(y, (x, weight, bias), gradient, allow_unused=True)

    expected = gradients()
    before = [torch.randn(ALL_CHANNELS) for _ in range(2)]
    sums = [tensor.clone() for tensor in before]
    with gradients_added_to([weight, bias], sums):
        to_x, to_weight, to_bias = gradients()
    assert torch.equal(to_x, expected[0])
    assert to_weight is None
    assert to_bias is None
    for found, start, added in zip(sums, before, expected[1:], strict=True):
        assert torch.equal(found, start + added)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


def test_batches_are_counted_where_statistics_are_tracked():
    x, weight, bias = _inputs((4, 24, 5, 5), torch.float32)
    running = [torch.zeros(24), torch.ones(24)]
    batches = torch.tensor(7)
    for _ in range(2):
        batch_norm_act(x, BatchNorm(weight, bias, "relu", *running, batches))
    assert batches.item() == 9
    # PyTorch does not see the kernel write them.
    assert [tensor._version for tensor in (*running, batches)] == [2, 2, 2]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_is_not_hidden(activation):
    x, weight, bias = _inputs((2, 8, 3, 3), torch.float32)
    with torch.no_grad():
        x[0, 2, 1, 1] = torch.nan
    y = batch_norm_act(x, BatchNorm(weight, bias, activation))
    assert y[:, 2].isnan().all()
    assert y[:, 3].isfinite().all()


@pytest.mark.parametrize("channels", [8, 33])
def test_running_statistics_are_updated_as_in_pytorch(channels):
    x, weight, bias = _inputs((4, channels, 5, 5), torch.float32)
    mean, variance = torch.randn(ALL_CHANNELS), torch.rand(ALL_CHANNELS)
    untouched = mean.clone(), variance.clone()
    expected = mean[:channels].clone(), variance[:channels].clone()
    functional.batch_norm(x, *expected, weight[:channels], bias[:channels], True, MOMENTUM, EPS)
    batch_norm_act(x, BatchNorm(weight, bias, "relu", mean, variance, momentum=MOMENTUM, eps=EPS))
    assert_near(mean[:channels], expected[0], 1e-6)
    assert_near(variance[:channels], expected[1], 1e-6)
    assert torch.equal(mean[channels:], untouched[0][channels:])
    assert torch.equal(variance[channels:], untouched[1][channels:])


def test_statistics_are_returned_and_carry_no_gradient():
    x, weight, bias = _inputs((4, 20, 5, 5), torch.float32)
    y, mean, variance = batch_norm_act_with_statistics(x, BatchNorm(weight, bias, "silu"))
    assert y.requires_grad
    assert not mean.requires_grad
    assert not variance.requires_grad
    assert_near(mean, x.detach().double().mean((0, 2, 3)), 1e-6)
    assert_near(variance, x.detach().double().var((0, 2, 3), correction=0), 2e-6)


def test_the_variance_survives_a_large_mean():
    torch.manual_seed(0)
    x = (1000 + torch.randn(8, 24, 9, 9)).contiguous(memory_format=torch.channels_last)
    ones, zeros = torch.ones(24), torch.zeros(24)
    _, mean, variance = batch_norm_act_with_statistics(x, BatchNorm(ones, zeros))
    assert_near(mean, x.double().mean((0, 2, 3)), 1e-6)
    assert_near(variance, x.double().var((0, 2, 3), correction=0), 1e-5)


def test_parameters_alone_can_be_trained():
    x, weight, bias = _inputs((4, 24, 5, 5), torch.float32)
    y = batch_norm_act(x.detach(), BatchNorm(weight, bias, "relu"))
    y.sum().backward()
    assert weight.grad is not None
    assert x.grad is None
