"""GPU kernels whose channel count is a run-time argument: a new width compiles nothing.

They read the parameters of the full-width network in place, on channels-last tensors of bfloat16,
float16 or float32, and sum in float32. Triton is imported when the first kernel is used; if it is
missing, :func:`available` and the ``supports_...`` functions return False, and PyTorch does the
work.

Gradients have the shape of the parameter that was passed: for the whole ``weight`` the gradient is
zero beyond the active channels, for ``weight[:channels]`` it has that length.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from anywidth.training.gpu.kernels.eligibility import (
    ACTIVATIONS,
    interpreted,
    obstacle_to_batch_norm_act,
    obstacle_to_depthwise_conv2d,
    obstacle_to_pointwise_conv2d,
    obstacle_to_stem_conv2d,
    reach,
    triton_installed,
)
from anywidth.training.gpu.kernels.norm_arguments import BatchNorm, DeferredNorm

__all__ = [
    "ACTIVATIONS",
    "BatchNorm",
    "DeferredNorm",
    "available",
    "reach",
    "supports_batch_norm_act",
    "supports_depthwise_conv2d",
    "supports_pointwise_conv2d",
    "supports_stem_conv2d",
]

# Names of this package that lie in a module that needs Triton.
_IN_MODULES = {
    "batch_norm_act": "batch_norm",
    "batch_norm_act_with_statistics": "batch_norm",
    "deferred_norm": "batch_norm",
    "depthwise_conv2d": "depthwise",
    "depthwise_conv2d_with_statistics": "depthwise",
    "has_few_pixels": "batch_norm_small",
    "norm_and_sum": "norm_sum",
    "pointwise_conv2d_with_statistics": "pointwise",
    "stem_conv2d_with_statistics": "stem",
}


def __getattr__(name: str) -> Any:
    if name not in _IN_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_IN_MODULES[name]}"), name)


def available() -> bool:
    """Whether Triton is installed, and a CUDA device or its interpreter can run kernels."""
    return triton_installed() and (torch.cuda.is_available() or interpreted())


def supports_depthwise_conv2d(x: Tensor, weight: Tensor, stride: int, padding: int) -> bool:
    """Whether :func:`depthwise_conv2d` takes these arguments; under autocast, with ``x`` cast."""
    return obstacle_to_depthwise_conv2d(x, weight, stride, padding) is None


def supports_stem_conv2d(
    x: Tensor, weight: Tensor, channels: int, stride: int, padding: int
) -> bool:
    """Whether :func:`stem_conv2d_with_statistics` takes these; under autocast, with ``x`` cast."""
    return obstacle_to_stem_conv2d(x, weight, channels, stride, padding) is None


def supports_pointwise_conv2d(x: Tensor, weight: Tensor, made: int) -> bool:
    """Whether :func:`pointwise_conv2d_with_statistics` takes these; under autocast, ``x`` cast."""
    return obstacle_to_pointwise_conv2d(x, weight, made) is None


def supports_batch_norm_act(x: Tensor, norm: BatchNorm) -> bool:
    """Whether :func:`batch_norm_act` takes these arguments."""
    return obstacle_to_batch_norm_act(x, norm) is None
