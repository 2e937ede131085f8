"""What the kernels take, what they say otherwise, and that nothing needs them."""

import subprocess
import sys

import pytest
import torch

from anywidth import AnywidthError
from anywidth.training.gpu import kernels
from anywidth.training.gpu.kernels import eligibility
from anywidth.training.gpu.kernels.launch_blocks import choose_folds, choose_parts, choose_strips


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let CPU tensors pass for tensors on a device, as in the interpreter."""
    monkeypatch.setattr(eligibility, "interpreted", lambda: True)


def _image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


FILTERS = torch.zeros(16, 1, 3, 3)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_depthwise_convolutions_of_the_zoo_are_supported(kernel, stride, dtype):
    x, weight = _image(2, 8, 7, 7, dtype=dtype), torch.zeros(16, 1, kernel, kernel)
    assert kernels.supports_depthwise_conv2d(x, weight, stride, kernel // 2)
    assert kernels.supports_depthwise_conv2d(x, weight[:8], stride, kernel // 2)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("x", "weight", "stride", "padding", "words"),
    [
        (torch.zeros(2, 8, 7, 7), FILTERS, 1, 1, "(392, 49, 7, 1)"),
        (_image(2, 8, 7, 7).double(), FILTERS, 1, 1, "float64"),
        (torch.zeros(8, 7, 7), FILTERS, 1, 1, "(8, 7, 7)"),
        (_image(0, 8, 7, 7), FILTERS, 1, 1, "(0, 8, 7, 7)"),
        (_image(2, 8, 7, 7), torch.zeros(16, 1, 7, 7), 1, 3, "kernel size"),
        (_image(2, 8, 7, 7), torch.zeros(16, 1, 3, 5), 1, 1, "(16, 1, 3, 5)"),
        (_image(2, 8, 7, 7), torch.zeros(16, 2, 3, 3), 1, 1, "(16, 2, 3, 3)"),
        (_image(2, 8, 7, 7), FILTERS, 3, 1, "stride"),
        (_image(2, 8, 7, 7), FILTERS, 1, 3, "padding"),
        (_image(2, 8, 2, 7), FILTERS, 1, 0, "3x3"),
        (_image(2, 17, 7, 7), FILTERS, 1, 1, "17"),
        (_image(2, 8, 7, 7), FILTERS.double(), 1, 1, "float64"),
    ],
)
def test_other_depthwise_convolutions_say_why_not(x, weight, stride, padding, words):
    assert not kernels.supports_depthwise_conv2d(x, weight, stride, padding)
    with pytest.raises(AnywidthError) as raised:
        kernels.depthwise_conv2d(x, weight, stride, padding)
    assert words in str(raised.value)
    assert "torch.nn.functional.conv2d" in str(raised.value)


ONE = torch.zeros(16)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
def test_batch_norms_are_supported(activation):
    x = _image(2, 8, 7, 7)
    assert kernels.supports_batch_norm_act(x, kernels.BatchNorm(ONE, ONE, activation))
    tracked = kernels.BatchNorm(ONE[:8], ONE[:8], activation, ONE, ONE[3:11])
    assert kernels.supports_batch_norm_act(x, tracked)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("x", "weight", "bias", "mean", "variance", "activation", "words"),
    [
        (torch.zeros(2, 8, 7, 7), ONE, ONE, None, None, "relu", "(392, 49, 7, 1)"),
        (_image(2, 8, 7, 7), ONE, ONE, None, None, "gelu", "'gelu'"),
        (_image(1, 8, 1, 1), ONE, ONE, None, None, "relu", "variance"),
        (_image(2, 8, 7, 7), ONE, ONE, ONE, None, "relu", "running_mean"),
        (_image(2, 8, 7, 7), None, ONE, None, None, "relu", "None"),
        (_image(2, 8, 7, 7), ONE, ONE[:9], None, None, "relu", "(9,)"),
        (_image(2, 8, 7, 7), ONE[:4], ONE[:4], None, None, "relu", "weight"),
        (_image(2, 8, 7, 7), ONE, ONE, ONE[::2], ONE[::2], "relu", "running_mean"),
        (_image(2, 8, 7, 7), ONE, ONE, ONE, ONE[:7], "relu", "running_var"),
    ],
)
def test_other_batch_norms_say_why_not(x, weight, bias, mean, variance, activation, words):
    norm = kernels.BatchNorm(weight, bias, activation, mean, variance)
    assert not kernels.supports_batch_norm_act(x, norm)
    with pytest.raises(AnywidthError) as raised:
        kernels.batch_norm_act(x, norm)
    assert words in str(raised.value)
    assert "torch.nn.functional.batch_norm" in str(raised.value)


def test_tensors_too_large_for_32_bit_offsets_are_refused(monkeypatch, as_on_a_gpu):
    x = _image(2, 8, 7, 7)
    monkeypatch.setattr(eligibility, "MOST_ELEMENTS", x.numel())
    assert kernels.supports_depthwise_conv2d(x, FILTERS, 1, 1)
    assert not kernels.supports_depthwise_conv2d(x, FILTERS, 1, 2)
    monkeypatch.setattr(eligibility, "MOST_ELEMENTS", x.numel() - 1)
    assert not kernels.supports_depthwise_conv2d(x, FILTERS, 1, 1)
    assert not kernels.supports_batch_norm_act(x, kernels.BatchNorm(ONE, ONE))


def test_a_tensor_in_main_memory_is_refused():
    x = _image(2, 8, 7, 7)
    assert not kernels.supports_depthwise_conv2d(x, FILTERS, 1, 1)
    with pytest.raises(AnywidthError, match="CUDA"):
        kernels.depthwise_conv2d(x, FILTERS, 1, 1)


def test_nothing_needs_triton():
    program = """
import sys
sys.modules["triton"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import torch
from anywidth.training.gpu import kernels
assert not kernels.available()
x = torch.zeros(2, 8, 7, 7).contiguous(memory_format=torch.channels_last)
assert not kernels.supports_depthwise_conv2d(x, torch.zeros(8, 1, 3, 3), 1, 1)
assert not kernels.supports_batch_norm_act(x, kernels.BatchNorm(torch.ones(8), torch.ones(8)))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_the_package_imports_no_triton():
    program = "import sys, anywidth.training.gpu.kernels; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_few_channels_fill_a_block():
    def filled(folds: int, units: int) -> float:
        return folds * units / (-(-folds * units // 64) * 64)

    for units in range(1, 300):
        folds = choose_folds(units, 64)
        assert folds in (1, 2, 4, 8)
        assert filled(folds, units) >= max(filled(1, units), min(0.5, units / 16))
        if units % 8 == 0:
            assert filled(folds, units) >= 0.9


def test_strips_and_parts_stay_within_the_work():
    assert choose_strips(programs=1, rows=112, shortest=8, wanted=1000) == 14
    assert choose_strips(programs=500, rows=112, shortest=8, wanted=1000) == 2
    assert choose_strips(programs=5000, rows=112, shortest=8, wanted=1000) == 1
    assert choose_strips(programs=1, rows=4, shortest=8, wanted=1000) == 1
    assert choose_parts(blocks=16, steps=500, wanted=528) == 33
    assert choose_parts(blocks=16, steps=3, wanted=528) == 3
    assert choose_parts(blocks=1000, steps=3, wanted=528) == 1
