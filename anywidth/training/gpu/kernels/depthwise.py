"""Depthwise convolution as a differentiable function of its input and of a larger parameter.

It may include the batch norm and activation before it, and the statistics for the norm after it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from anywidth.errors import AnywidthError
from anywidth.training.gpu.kernels import batch_norm_small
from anywidth.training.gpu.kernels.batch_norm_backward import gradients_through_norm
from anywidth.training.gpu.kernels.depthwise_forward import depthwise_forward
from anywidth.training.gpu.kernels.depthwise_gradients import depthwise_gradients
from anywidth.training.gpu.kernels.eligibility import obstacle_to_depthwise_conv2d
from anywidth.training.gpu.kernels.norm_arguments import DeferredNorm


class _DepthwiseConv2d(torch.autograd.Function):
    """Saves the original input, before a norm that is computed while reading."""

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        terms: Tensor | None,
        activation: str,
        stride: int,
        padding: int,
        statistics: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, weight, norm_weight, norm_bias, terms)
        ctx.activation, ctx.stride, ctx.padding = activation, stride, padding
        ctx.set_materialize_grads(False)
        with torch.cuda.device_of(x):
            y, partial = depthwise_forward(
                x, weight, stride, padding, terms, activation, statistics
            )
        if partial is not None:
            ctx.mark_non_differentiable(partial)
        return y, partial

    @staticmethod
    @once_differentiable
    @custom_bwd(device_type="cuda")
    def backward(  # type: ignore[override]
        ctx: Any, dy: Tensor | None, *unused: None
    ) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 9
        x, weight, norm_weight, norm_bias, terms = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        x_gradient, weight_gradient, partial = depthwise_gradients(
            x, dy, weight, ctx.stride, ctx.padding, terms, ctx.activation
        )
        norm_gradients: list[Tensor | None] = [None, None]
        if partial is not None:
            x_gradient, *norm_gradients = gradients_through_norm(
                x, x_gradient, partial, terms, norm_weight, norm_bias, ctx.activation
            )
        return x_gradient, weight_gradient, *norm_gradients, *(None,) * 5


def depthwise_conv2d(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Convolve each channel of ``x`` with its own filter.

    Args:
        x: channels-last input of C channels. Under autocast it is cast, as for any convolution.
        weight: filters of at least C channels, ``(channels, 1, k, k)`` with k 3 or 5. The first C
            are read in place, in their dtype.
        stride: 1 or 2.
        padding: zeros added on every side, less than k.
    """
    output, _ = depthwise_conv2d_with_statistics(x, weight, stride, padding, statistics=False)
    return output


def depthwise_conv2d_with_statistics(
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    norm: DeferredNorm | None = None,
    statistics: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """:func:`depthwise_conv2d` of a normalised input, with statistics for the norm after it.

    Args:
        x: as in :func:`depthwise_conv2d`.
        weight: as above.
        stride: as above.
        padding: as above.
        norm: normalises and activates ``x`` while it is read; see :func:`deferred_norm`.
        statistics: whether to return statistics of parts of the output, which
            :func:`batch_norm_act` and :func:`deferred_norm` take as ``partial``.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    obstacle = obstacle_to_depthwise_conv2d(x, weight, stride, padding)
    if obstacle is not None:
        raise AnywidthError(
            f"depthwise_conv2d: {obstacle}. Ask supports_depthwise_conv2d first and "
            "fall back to torch.nn.functional.conv2d."
        )
    pixels = _output_pixels(x, weight.shape[-1], stride, padding)
    statistics = statistics and pixels > batch_norm_small.MOST_PIXELS
    first: tuple[Any, ...] = (None, None, None, "none")
    if norm is not None:
        first = (norm.weight, norm.bias, norm.terms, norm.activation)
    y, partial = _DepthwiseConv2d.apply(x, weight, *first, stride, padding, statistics)
    return y, partial


def _output_pixels(x: Tensor, kernel: int, stride: int, padding: int) -> int:
    height, width = ((size + 2 * padding - kernel) // stride + 1 for size in x.shape[2:])
    return x.shape[0] * height * width
