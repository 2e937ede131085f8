"""A new width compiles nothing, and the kernels compile for a GPU that is not here.

Launches are caught before they reach a device; what Triton would key its cache with is compared
between widths, and a few kernels are compiled for compute capability 9.0.
"""

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from anywidth.training.gpu.kernels import (
    BatchNorm,
    batch_norm_backward,
    batch_norm_forward,
    batch_norm_small,
    crop_resize,
    depthwise_forward,
    depthwise_gradients,
    pointwise_product,
    stem_convolution,
)
from anywidth.training.gpu.kernels.compilation import KERNELS
from anywidth.training.gpu.kernels.eligibility import MOST_POINTWISE_CHANNELS

TARGET = GPUTarget("cuda", 90, 32)
ALIGNED_WIDTHS = [8, 16, 24, 32, 40, 64, 72, 136, 256, 264]
OTHER_WIDTHS = [1, 3, 7, 17, 33, 257]
ALL_CHANNELS = 264
# Bytes of shared memory that a program may have on an H200.
SHARED_MEMORY = 227 * 1024


@pytest.fixture
def launches(monkeypatch):
    """Every launch, as (kernel name, positional arguments, named arguments)."""
    caught = []
    for name, kernel in KERNELS.items():

        def catch(*arguments, grid, warmup, name=name, **named):
            assert all(isinstance(size, int) and size > 0 for size in grid)
            caught.append((name, arguments, named))

        monkeypatch.setattr(kernel, "run", catch)
    return caught


def _launch_everything(channels: int, kernel: int, stride: int) -> None:
    x = torch.empty(2, channels, 9, 9, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    filters = torch.empty(ALL_CHANNELS, 1, kernel, kernel)
    y, _ = depthwise_forward.depthwise_forward(x, filters, stride, kernel // 2)
    depthwise_gradients.depthwise_gradients(x, y, filters, stride, kernel // 2)
    # Parameters and statistics that begin anywhere.
    start = channels // 8 % 4
    flat = torch.empty(4 * ALL_CHANNELS + start)
    weight, bias, mean, variance = flat[start:].view(4, ALL_CHANNELS)
    batches = torch.zeros((), dtype=torch.int64)
    norm = BatchNorm(weight, bias, "relu", mean, variance, batches)
    terms = batch_norm_forward.batch_terms(x, norm)
    z = batch_norm_forward.normalize_and_activate(x, terms, "relu")
    _, _, corrections = batch_norm_backward.parameter_gradients(x, z, terms, weight, bias, "relu")
    batch_norm_backward.input_gradient(x, z, terms, corrections, "relu")
    batch_norm_forward.normalize_and_activate(x, terms, "relu", z)
    batch_norm_backward.parameter_gradients(x, z, terms, weight, bias, "none", (z, y))
    done = (filters, stride, kernel // 2, terms, "relu")
    y, partial = depthwise_forward.depthwise_forward(x, *done, statistics=True)
    depthwise_gradients.depthwise_gradients(x, y, *done)
    batch_norm_forward.merged_terms(partial, y.numel() // channels, norm)
    picture = torch.empty(2, 3, 9, 9, dtype=x.dtype).to(memory_format=torch.channels_last)
    filters = torch.empty(ALL_CHANNELS, 3, 3, 3)
    z, _ = stem_convolution.stem_forward(picture, filters, channels, stride, 1, True)
    stem_convolution.stem_weight_gradient(picture, z, filters, stride, 1)
    few = x[:, : MOST_POINTWISE_CHANNELS - channels % 2]
    few = few.contiguous(memory_format=torch.channels_last)
    filters = torch.empty(*2 * [MOST_POINTWISE_CHANNELS], 1, 1, dtype=x.dtype)
    terms = terms[:, : few.shape[1]].contiguous()
    y, _ = pointwise_product.pointwise_forward(few, filters, few.shape[1], terms, "relu", True)
    pointwise_product.pointwise_weight_gradient(few, y, filters, terms, "relu")
    pointwise_product.pointwise_input_gradient(few, y, filters, terms, "relu")
    images = torch.empty(2, channels, channels, 3, dtype=torch.uint8)
    crop_resize.crop_and_resize(torch.empty(channels, 8, dtype=torch.int64), images)
    y, terms = batch_norm_small.small_forward(x, norm)
    batch_norm_small.small_backward(x, y, terms, weight, bias, "relu")


def _cache_keys(launches) -> set[str]:
    """What tells one compiled variant of a kernel from another."""
    backend = make_backend(TARGET)
    keys = set()
    for name, arguments, named in launches:
        kernel = KERNELS[name]
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = bind(*arguments, **named)
        keys.add(f"{name} {specialization} {options}")
    return keys


@pytest.mark.parametrize("widths", [ALIGNED_WIDTHS, OTHER_WIDTHS], ids=["aligned", "other"])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_a_new_width_compiles_nothing(launches, widths, kernel, stride):
    _launch_everything(widths[0], kernel, stride)
    first = _cache_keys(launches)
    # The depthwise kernels have two variants each, with and without a norm; partial sums are added
    # for filters of two sizes; two kernels of the norm know residual sums.
    assert len(first) == len(KERNELS) + 5
    for channels in widths[1:]:
        _launch_everything(channels, kernel, stride)
    assert _cache_keys(launches) == first


def test_another_kernel_size_is_another_variant(launches):
    _launch_everything(8, 3, 1)
    first = _cache_keys(launches)
    _launch_everything(8, 5, 1)
    assert _cache_keys(launches) > first


def _compile(name: str, arguments, named):
    """Compile one caught launch for the GPU."""
    kernel = KERNELS[name]
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))
    bound, specialization, options = bind(*arguments, **named)
    signature, constants, hints = {}, {}, {}
    for index, (parameter, (kind, hint)) in enumerate(
        zip(kernel.params, specialization, strict=True)
    ):
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = bound[parameter.name]
        elif hint == "D":
            hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    return triton.compile(source, target=TARGET, options=options)


def test_kernels_compile_and_move_whole_vectors(launches):
    _launch_everything(40, 3, 1)
    for name, arguments, named in launches:
        compiled = _compile(name, arguments, named)
        assert compiled.metadata.shared <= SHARED_MEMORY, name
        assembly = compiled.asm["ptx"]
        loads = re.findall(r"ld\.global\S*", assembly)
        if name.startswith("depthwise"):
            assert not any(load.endswith("16") for load in loads), name
        elif name == "stem_forward_kernel":  # whose input has 3 channels
            assert re.search(r"st\.global\S*\.v4\.b32", assembly), name
        elif name == "stem_weight_gradient_kernel" or name.startswith("pointwise"):
            assert "cp.async.cg.shared.global" in assembly, name  # 16 bytes at once, in advance
        elif named.get("ALIGNED"):
            assert any(load.endswith(".v4.b32") for load in loads), name
        assert ".local" not in assembly, f"{name} spills"
