"""Depthwise convolution against PyTorch in float64: values and gradients, odd shapes, slices."""

import pytest
import torch
from interpreter import assert_near
from torch import Tensor
from torch.nn.functional import conv2d

from anywidth.training.gpu.kernels import depthwise_conv2d
from anywidth.training.gpu.kernels.shared_buffers import gradients_added_to

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
INACTIVE_CHANNELS = 3

# kernel size, stride, padding, (images, channels, height, width)
SHAPES = [
    (3, 1, 1, (1, 1, 1, 1)),
    (3, 1, 1, (2, 3, 5, 7)),
    (3, 1, 1, (3, 8, 7, 8)),
    (3, 1, 1, (1, 20, 5, 5)),
    (3, 1, 1, (1, 33, 4, 5)),
    (3, 2, 1, (3, 1, 5, 8)),
    (3, 2, 1, (2, 8, 8, 7)),
    (3, 2, 1, (1, 20, 5, 8)),
    (3, 2, 1, (1, 33, 4, 1)),
    (5, 1, 2, (1, 3, 5, 7)),
    (5, 1, 2, (1, 8, 8, 1)),
    (5, 2, 2, (1, 8, 7, 8)),
    (5, 2, 2, (1, 12, 5, 1)),
    # Padding other than half the kernel.
    (3, 1, 0, (2, 6, 5, 5)),
    (3, 2, 2, (2, 6, 5, 6)),
    (5, 2, 1, (1, 6, 6, 7)),
    # Several strips of rows, the last one shorter.
    (3, 1, 1, (1, 4, 19, 3)),
    (3, 2, 1, (1, 4, 37, 3)),
    # Blocks that are left partly empty, and several partial sums.
    (3, 1, 1, (37, 4, 2, 4)),
]


def _inputs(kernel: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(sum(shape) + kernel)
    x = torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)
    all_channels = shape[1] + INACTIVE_CHANNELS
    return x.requires_grad_(), torch.randn(all_channels, 1, kernel, kernel, requires_grad=True)


def _check(x: Tensor, weight: Tensor, stride: int, padding: int, view: bool = False) -> None:
    channels = x.shape[1]
    exact_x = x.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    expected = conv2d(exact_x, exact_weight[:channels], None, stride, padding, groups=channels)
    gradient = torch.randn(expected.shape).to(x.dtype)
    expected.backward(gradient.double())

    y = depthwise_conv2d(x, weight[:channels] if view else weight, stride, padding)
    y.backward(gradient)
    tolerance = TOLERANCE[x.dtype]
    assert y.dtype == x.dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_near(y, expected, tolerance)
    assert_near(x.grad, exact_x.grad, tolerance)
    # Sums over pixels are float32 whatever the input's type.
    assert_near(weight.grad, exact_weight.grad, 2e-6)
    assert not weight.grad[channels:].any()


@pytest.mark.parametrize(("kernel", "stride", "padding", "shape"), SHAPES)
def test_values_and_gradients(kernel, stride, padding, shape):
    x, weight = _inputs(kernel, shape, torch.float32)
    _check(x, weight, stride, padding)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_is_added_to_a_sum_of_the_active_channels(memory_format):
    x, weight = _inputs(3, (2, 8, 7, 5), torch.float32)
    weight = weight.detach().to(memory_format=memory_format).requires_grad_()
    gradient = torch.randn(2, 8, 7, 5)

    def gradients():
        y = depthwise_conv2d(x, weight, 1, 1)
        return torch.autograd.grad(y, (x, weight), gradient, allow_unused=True)

    to_x, to_weight = gradients()
    before = torch.randn(weight.shape).to(memory_format=memory_format)
    total = before.clone()
    with gradients_added_to([weight], [total]):
        found = gradients()
    assert torch.equal(found[0], to_x)
    assert found[1] is None
    assert torch.equal(total, before + to_weight)


@pytest.mark.parametrize(
    ("kernel", "stride", "dtype"),
    [
        (3, 1, torch.float16),
        (3, 1, torch.bfloat16),
        (3, 2, torch.bfloat16),
        (5, 2, torch.bfloat16),
    ],
)
def test_half_precision(kernel, stride, dtype):
    x, weight = _inputs(kernel, (1, 8, 5, 3), dtype)
    _check(x, weight, stride, kernel // 2)


def test_a_view_of_the_parameter_gets_its_gradient_through_the_slice():
    x, weight = _inputs(3, (1, 8, 5, 5), torch.float32)
    _check(x, weight, 1, 1, view=True)


def test_the_weight_is_read_with_its_own_strides():
    torch.manual_seed(0)
    x = torch.randn(1, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(3, 3, 1, 16).permute(3, 2, 1, 0)
    expected = conv2d(x.double(), weight[:8].double(), None, 1, 1, groups=8)
    assert_near(depthwise_conv2d(x, weight, 1, 1), expected, 2e-6)


def test_autocast_casts_the_input_and_not_the_parameter():
    x, weight = _inputs(3, (1, 8, 5, 5), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = depthwise_conv2d(x, weight, 1, 1)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == weight.grad.dtype == torch.float32


def test_a_gradient_in_another_memory_format():
    x, weight = _inputs(3, (1, 8, 5, 5), torch.float32)
    scale = torch.randn(1, 8, 5, 5)
    depthwise_conv2d(x, weight, 1, 1).mul(scale).sum().backward()
    other = x.detach().double().requires_grad_()
    conv2d(other, weight.detach()[:8].double(), None, 1, 1, groups=8).mul(scale).sum().backward()
    assert_near(x.grad, other.grad, 2e-6)


def test_the_weight_gradient_is_the_same_every_time():
    gradients = []
    for _ in range(2):
        x, weight = _inputs(3, (37, 4, 2, 4), torch.float32)
        depthwise_conv2d(x, weight, 1, 1).square().sum().backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)
