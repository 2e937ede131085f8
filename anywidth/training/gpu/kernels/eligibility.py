"""Checks of kernel arguments: each returns the obstacle, or None. They do not need Triton."""

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from anywidth.training.gpu.kernels.norm_arguments import BatchNorm

ACTIVATIONS = ("none", "relu", "relu6", "silu", "hardswish")
KERNEL_SIZES = (3, 5)
STRIDES = (1, 2)
STEM_KERNEL_SIZE = 3
STEM_INPUT_CHANNELS = (1, 2, 3, 4)
# Of a weight whose products have kernels: shared memory holds a block of all its channels.
MOST_POINTWISE_CHANNELS = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Offsets inside the kernels are 32-bit integers, and a last block may reach past the end.
MOST_ELEMENTS = 2**31 - 2**26


@cache
def triton_installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run on the CPU in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def reach(x: Tensor) -> bool:
    """Whether kernels can work on the device of a tensor."""
    return x.is_cuda or interpreted()


def obstacle_to_depthwise_conv2d(
    x: Tensor, weight: Tensor, stride: int, padding: int
) -> str | None:
    """Why a depthwise convolution cannot run here, or None."""
    obstacle = _obstacle_to_input(x)
    if obstacle is not None:
        return obstacle
    kernel = weight.shape[-1]
    if weight.dim() != 4 or weight.shape[1:] != (1, kernel, kernel):
        return f"weight has shape {tuple(weight.shape)}, expected (channels, 1, k, k)"
    if kernel not in KERNEL_SIZES:
        return f"the kernel size is {kernel}, expected one of {KERNEL_SIZES}"
    obstacle = _obstacle_to_sizes(x, x.shape[1], kernel, stride, padding)
    return obstacle or _obstacle_to_parameter("weight", weight, x)


def obstacle_to_stem_conv2d(
    x: Tensor, weight: Tensor, channels: int, stride: int, padding: int
) -> str | None:
    """Why a convolution of an image cannot run here, or None."""
    obstacle = _obstacle_to_input(x)
    if obstacle is not None:
        return obstacle
    kernel, read = STEM_KERNEL_SIZE, x.shape[1]
    if x.requires_grad:
        return "x requires a gradient, expected an image without one"
    if read not in STEM_INPUT_CHANNELS:
        return f"x has {read} channels, expected one of {STEM_INPUT_CHANNELS}"
    if weight.dim() != 4 or weight.shape[1:] != (read, kernel, kernel):
        return f"weight has shape {tuple(weight.shape)}, expected (channels, {read}, 3, 3)"
    if not 0 < channels <= weight.shape[0]:
        return f"channels is {channels}, expected 1 to {weight.shape[0]}, the filters of weight"
    obstacle = _obstacle_to_sizes(x, channels, kernel, stride, padding)
    if obstacle is not None:
        return obstacle
    if weight.dtype not in DTYPES or weight.device != x.device:
        return (
            f"weight is {weight.dtype} on {weight.device}, expected one of {DTYPES} on {x.device}"
        )
    return None


def obstacle_to_pointwise_conv2d(x: Tensor, weight: Tensor, made: int) -> str | None:
    """Why a convolution with filters of one pixel cannot run here, or None."""
    obstacle = _obstacle_to_input(x)
    if obstacle is not None:
        return obstacle
    if x.dtype == torch.float32 and not interpreted():
        return "x has dtype torch.float32, of which shared memory cannot hold enough"
    if weight.dim() != 4 or weight.shape[2:] != (1, 1):
        return f"weight has shape {tuple(weight.shape)}, expected (filters, channels, 1, 1)"
    if max(weight.shape) > MOST_POINTWISE_CHANNELS:
        return (
            f"weight has shape {tuple(weight.shape)}, expected at most {MOST_POINTWISE_CHANNELS} "
            "filters and channels"
        )
    if x.shape[1] > weight.shape[1]:
        return f"x has {x.shape[1]} channels, expected at most weight's {weight.shape[1]}"
    if not 0 < made <= weight.shape[0]:
        return f"made is {made}, expected 1 to {weight.shape[0]}, the filters of weight"
    if x.numel() // x.shape[1] * made > MOST_ELEMENTS:
        return f"the output has more than {MOST_ELEMENTS} elements"
    if weight.dtype not in DTYPES or weight.device != x.device or weight.stride(1) != 1:
        return (
            f"weight is {weight.dtype} on {weight.device} with strides {weight.stride()}, expected "
            f"one of {DTYPES} on {x.device}, each filter in one piece"
        )
    return None


def _obstacle_to_sizes(
    x: Tensor, channels: int, kernel: int, stride: int, padding: int
) -> str | None:
    """Why a convolution with these sizes cannot run, or None."""
    if stride not in STRIDES:
        return f"the stride is {stride}, expected one of {STRIDES}"
    if not 0 <= padding < kernel:
        return f"the padding is {padding}, expected 0 to {kernel - 1}"
    height, width = ((size + 2 * padding - kernel) // stride + 1 for size in x.shape[2:])
    if height < 1 or width < 1:
        return f"x has shape {tuple(x.shape)}, smaller than the {kernel}x{kernel} kernel"
    if x.shape[0] * channels * height * width > MOST_ELEMENTS:
        return f"the output of {height}x{width} pixels has more than {MOST_ELEMENTS} elements"
    return None


def obstacle_to_batch_norm_act(x: Tensor, norm: BatchNorm) -> str | None:
    """Why a batch norm in training with its activation cannot run here, or None."""
    obstacle = _obstacle_to_input(x)
    if obstacle is not None:
        return obstacle
    if norm.activation not in ACTIVATIONS:
        return f"the activation is {norm.activation!r}, expected one of {ACTIVATIONS}"
    if x.numel() == x.shape[1]:
        return f"x has shape {tuple(x.shape)}: one value per channel has no variance"
    if (norm.running_mean is None) != (norm.running_var is None):
        return "only one of running_mean and running_var is given, expected both or neither"
    if any(parameter is None for parameter in (norm.weight, norm.bias)):
        return "weight or bias is None, expected both"
    if norm.weight.shape != norm.bias.shape:
        return f"weight has shape {tuple(norm.weight.shape)} and bias {tuple(norm.bias.shape)}"
    for name in ("weight", "bias", "running_mean", "running_var"):
        vector = getattr(norm, name)
        if vector is None:
            continue
        if vector.dim() != 1 or vector.stride(0) != 1:
            return f"{name} has shape {tuple(vector.shape)}, expected one contiguous axis"
        obstacle = _obstacle_to_parameter(name, vector, x)
        if obstacle is not None:
            return obstacle
    return None


def _obstacle_to_input(x: Tensor) -> str | None:
    if not triton_installed():
        return "Triton is not installed"
    if not reach(x):
        return f"x is on {x.device}, expected a CUDA device"
    if x.dtype not in DTYPES:
        return f"x has dtype {x.dtype}, expected one of {DTYPES}"
    if x.dim() != 4 or not 0 < x.numel() <= MOST_ELEMENTS:
        return (
            f"x has shape {tuple(x.shape)}, expected (N, C, H, W) "
            f"with 1 to {MOST_ELEMENTS} elements"
        )
    if not x.is_contiguous(memory_format=torch.channels_last):
        return f"x has strides {x.stride()}, expected torch.channels_last memory"
    return None


def _obstacle_to_parameter(name: str, parameter: Tensor, x: Tensor) -> str | None:
    if parameter.dtype not in DTYPES or parameter.device != x.device:
        return (
            f"{name} is {parameter.dtype} on {parameter.device}, "
            f"expected one of {DTYPES} on {x.device}"
        )
    if parameter.shape[0] < x.shape[1]:
        return f"{name} has {parameter.shape[0]} channels, expected at least x's {x.shape[1]}"
    return None
