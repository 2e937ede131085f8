"""GPU kernels whose channel count is a run-time argument: a new width compiles nothing.

They read the parameters of the full-width network in place, on channels-last tensors of bfloat16,
float16 or float32, and sum in float32. Triton is imported by the first call; where it is missing,
:func:`available` and the ``supports_...`` functions answer False, and PyTorch does the work.

Gradients have the shape of the parameter that was passed: hand in ``weight`` whole and the
gradient is zero beyond the active channels, hand in ``weight[:channels]`` and it is that long.
"""

import torch
from torch import Tensor

from anywidth.training.gpu.kernels.eligibility import (
    ACTIVATIONS,
    interpreted,
    obstacle_to_batch_norm_act,
    obstacle_to_depthwise_conv2d,
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
    "batch_norm_act",
    "batch_norm_act_with_statistics",
    "deferred_norm",
    "depthwise_conv2d",
    "depthwise_conv2d_with_statistics",
    "has_few_pixels",
    "reach",
    "stem_conv2d_with_statistics",
    "supports_batch_norm_act",
    "supports_depthwise_conv2d",
    "supports_stem_conv2d",
]


def available() -> bool:
    """Whether there is Triton, and a CUDA device or its interpreter to run the kernels with."""
    return triton_installed() and (torch.cuda.is_available() or interpreted())


def supports_depthwise_conv2d(x: Tensor, weight: Tensor, stride: int, padding: int) -> bool:
    """Whether :func:`depthwise_conv2d` takes these arguments; under autocast, with ``x`` cast."""
    return obstacle_to_depthwise_conv2d(x, weight, stride, padding) is None


def depthwise_conv2d(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Convolve each channel of ``x`` with its own filter.

    Args:
        x: channels-last input of C channels. Under autocast it is cast, as for any convolution.
        weight: filters of at least C channels, ``(channels, 1, k, k)`` with k 3 or 5. The first C
            are used, where they lie and in the dtype they have.
        stride: 1 or 2.
        padding: zeros added on every side, less than k.
    """
    from anywidth.training.gpu.kernels import depthwise

    none = depthwise.depthwise_conv2d_with_statistics(x, weight, stride, padding, None, False)
    return none[0]


def depthwise_conv2d_with_statistics(
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    norm: DeferredNorm | None = None,
    statistics: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """:func:`depthwise_conv2d` of a normalised input, with what a norm after it can begin with.

    Args:
        x: as for :func:`depthwise_conv2d`.
        weight: likewise.
        stride: likewise.
        padding: likewise.
        norm: normalises and activates ``x`` while it is read; see :func:`deferred_norm`.
        statistics: whether to return statistics of parts of the output, which
            :func:`batch_norm_act` and :func:`deferred_norm` take as ``partial``.
    """
    from anywidth.training.gpu.kernels import depthwise

    return depthwise.depthwise_conv2d_with_statistics(x, weight, stride, padding, norm, statistics)


def supports_stem_conv2d(
    x: Tensor, weight: Tensor, channels: int, stride: int, padding: int
) -> bool:
    """Whether :func:`stem_conv2d_with_statistics` takes these; under autocast, with ``x`` cast."""
    return obstacle_to_stem_conv2d(x, weight, channels, stride, padding) is None


def stem_conv2d_with_statistics(
    x: Tensor, weight: Tensor, channels: int, stride: int, padding: int, statistics: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Convolve a picture: a dense 3x3 convolution of one to four input channels.

    Args:
        x: channels-last data that needs no gradient. Under autocast it is cast, as for any
            convolution.
        weight: filters, ``(channels, x's channels, 3, 3)``, used where they lie and cast to the
            type of ``x``.
        channels: how many of them are used, the first ones.
        stride: 1 or 2.
        padding: zeros added on every side, less than 3.
        statistics: whether to return statistics of parts of the output, which
            :func:`batch_norm_act` and :func:`deferred_norm` take as ``partial``.
    """
    from anywidth.training.gpu.kernels import stem

    return stem.stem_conv2d_with_statistics(x, weight, channels, stride, padding, statistics)


def supports_batch_norm_act(x: Tensor, norm: BatchNorm) -> bool:
    """Whether :func:`batch_norm_act` takes these arguments."""
    return obstacle_to_batch_norm_act(x, norm) is None


def batch_norm_act(x: Tensor, norm: BatchNorm, partial: Tensor | None = None) -> Tensor:
    """Normalise ``x`` by the statistics of this batch, then activate it.

    Args:
        x: channels-last input, more than one value a channel.
        norm: what normalises it.
        partial: statistics of parts of ``x``, where its maker took them; saves a pass over it.
    """
    output, _, _ = batch_norm_act_with_statistics(x, norm, partial)
    return output


def batch_norm_act_with_statistics(
    x: Tensor, norm: BatchNorm, partial: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`batch_norm_act`, with the batch's mean and (biased) variance for calibration.

    Both are float32 and carry no gradient.
    """
    from anywidth.training.gpu.kernels import batch_norm

    return batch_norm.batch_norm_act_with_statistics(x, norm, partial)


def has_few_pixels(x: Tensor) -> bool:
    """Whether batch norm takes one launch for all of this tensor; deferring it is then no gain."""
    from anywidth.training.gpu.kernels import batch_norm_small

    return batch_norm_small.is_small(x)


def deferred_norm(x: Tensor, norm: BatchNorm, partial: Tensor | None = None) -> DeferredNorm:
    """The statistics of :func:`batch_norm_act` alone: a convolution does the rest.

    What it returns goes to :func:`depthwise_conv2d_with_statistics` together with ``x``: the
    normalised tensor is never written, nor read again.
    """
    from anywidth.training.gpu.kernels import batch_norm

    return batch_norm.deferred_norm(x, norm, partial)
