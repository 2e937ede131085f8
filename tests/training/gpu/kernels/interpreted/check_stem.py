"""The convolution of pictures against PyTorch in float64: values, gradients, statistics."""

import pytest
import torch
from interpreter import assert_near
from torch import Tensor
from torch.nn.functional import conv2d

from anywidth import AnywidthError
from anywidth.training.gpu import kernels
from anywidth.training.gpu.kernels import batch_norm_small
from anywidth.training.gpu.kernels.shared_buffers import gradients_added_to

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
MORE = 3  # filters of the parameter that are not used

# channels made, stride, padding, (images, channels read, height, width)
SHAPES = [
    (8, 1, 1, (2, 3, 5, 7)),
    (32, 1, 1, (1, 3, 8, 6)),
    (33, 1, 1, (1, 3, 4, 5)),
    (5, 2, 1, (2, 3, 8, 7)),
    (16, 2, 1, (3, 1, 9, 9)),
    (6, 2, 0, (1, 2, 7, 6)),
    (4, 1, 2, (1, 4, 5, 5)),
    (1, 1, 1, (1, 3, 1, 1)),
    # Several blocks of pixels, the last one partly empty.
    (4, 1, 1, (3, 3, 9, 11)),
]


def _inputs(
    made: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(sum(shape) + made)
    x = torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)
    return x, torch.randn(made + MORE, shape[1], 3, 3, requires_grad=True)


def _expected(x: Tensor, weight: Tensor, made: int, stride: int, padding: int):
    """In float64, with the filters in the type of the pictures."""
    rounded = weight.detach().to(x.dtype).double().requires_grad_()
    y = conv2d(x.double(), rounded[:made], None, stride, padding)
    gradient = torch.randn(y.shape).to(x.dtype)
    y.backward(gradient.double())
    return y.detach(), gradient, rounded.grad


@pytest.mark.parametrize(("made", "stride", "padding", "shape"), SHAPES)
def test_values_and_gradients(made, stride, padding, shape):
    x, weight = _inputs(made, shape)
    expected, gradient, expected_gradient = _expected(x, weight, made, stride, padding)
    y, partial = kernels.stem_conv2d_with_statistics(x, weight, made, stride, padding, False)
    assert partial is None
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_near(y, expected, 2e-6)
    y.backward(gradient)
    assert_near(weight.grad, expected_gradient, 2e-6)
    assert not weight.grad[made:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    x, weight = _inputs(8, (2, 3, 6, 5), dtype)
    expected, gradient, expected_gradient = _expected(x, weight, 8, 1, 1)
    y, _ = kernels.stem_conv2d_with_statistics(x, weight, 8, 1, 1)
    assert y.dtype == dtype
    assert_near(y, expected, TOLERANCE[dtype])
    y.backward(gradient)
    # Sums over pixels are float32 whatever the input's type.
    assert_near(weight.grad, expected_gradient, 1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_is_added_to_a_sum_of_the_active_filters(memory_format):
    x, weight = _inputs(8, (2, 3, 7, 5))
    weight = weight.detach().to(memory_format=memory_format).requires_grad_()
    gradient = torch.randn(2, 8, 7, 5)

    def gradients():
        y, _ = kernels.stem_conv2d_with_statistics(x, weight, 8, 1, 1)
        return torch.autograd.grad(y, (weight,), gradient, allow_unused=True)

    (to_weight,) = gradients()
    before = torch.randn(weight.shape).to(memory_format=memory_format)
    total = before.clone(memory_format=torch.preserve_format)
    with gradients_added_to([weight], [total]):
        found = gradients()
    assert found[0] is None
    assert torch.equal(total, before + to_weight)


@pytest.mark.parametrize(("made", "shape"), [(8, (2, 3, 40, 60)), (33, (1, 1, 64, 70))])
def test_statistics_for_the_norm_after_it(made, shape):
    x, weight = _inputs(made, shape)
    assert shape[0] * shape[2] * shape[3] > batch_norm_small.MOST_PIXELS
    x = (x + 5).contiguous(memory_format=torch.channels_last)  # a mean far from zero
    y, partial = kernels.stem_conv2d_with_statistics(x, weight, made, 1, 1)
    assert partial is not None
    assert not partial.requires_grad
    norm = kernels.BatchNorm(torch.ones(made), torch.zeros(made))
    terms = kernels.deferred_norm(y.detach(), norm, partial).terms
    whole = y.detach().double()
    assert_near(terms[0], whole.mean((0, 2, 3)), 1e-5)
    assert_near(terms[1], whole.var((0, 2, 3), correction=0), 1e-5)


def test_few_pixels_have_no_statistics():
    x, weight = _inputs(8, (1, 3, 5, 5))
    assert kernels.stem_conv2d_with_statistics(x, weight, 8, 1, 1)[1] is None


def test_autocast_casts_the_picture():
    x, weight = _inputs(8, (1, 3, 5, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = kernels.stem_conv2d_with_statistics(x, weight, 8, 1, 1)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32


def test_a_gradient_in_another_memory_format():
    x, weight = _inputs(8, (1, 3, 5, 5))
    scale = torch.randn(1, 8, 5, 5)
    kernels.stem_conv2d_with_statistics(x, weight, 8, 1, 1)[0].mul(scale).sum().backward()
    other = weight.detach().double().requires_grad_()
    conv2d(x.double(), other[:8], None, 1, 1).mul(scale).sum().backward()
    assert_near(weight.grad, other.grad, 2e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.randn(1, 5, 4, 4)}, "5 channels"),
        ({"x": torch.randn(1, 3, 4, 4, requires_grad=True)}, "gradient"),
        ({"weight": torch.randn(8, 3, 5, 5)}, "(channels, 3, 3, 3)"),
        ({"channels": 9}, "9"),
        ({"stride": 3}, "stride"),
        ({"padding": 3}, "padding"),
        ({"x": torch.randn(1, 3, 1, 1), "padding": 0}, "3x3"),
        ({"weight": torch.randn(8, 3, 3, 3).double()}, "float64"),
    ],
)
def test_what_it_cannot_do_is_said(change, words):
    arguments = {
        "x": torch.randn(1, 3, 4, 4),
        "weight": torch.randn(8, 3, 3, 3),
        "channels": 8,
        "stride": 1,
        "padding": 1,
    } | change
    arguments["x"] = arguments["x"].contiguous(memory_format=torch.channels_last)
    assert not kernels.supports_stem_conv2d(**arguments)
    with pytest.raises(AnywidthError) as error:
        kernels.stem_conv2d_with_statistics(**arguments)
    assert words in str(error.value)
