"""Pointwise convolution as a differentiable function of its input and of a larger parameter.

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
from anywidth.training.gpu.kernels.eligibility import obstacle_to_pointwise_conv2d
from anywidth.training.gpu.kernels.norm_arguments import DeferredNorm
from anywidth.training.gpu.kernels.pointwise_product import (
    pointwise_forward,
    pointwise_input_gradient,
    pointwise_weight_gradient,
)
from anywidth.training.gpu.kernels.shared_buffers import added_to_sum, cast_weight


class _PointwiseConv2d(torch.autograd.Function):
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
        made: int,
        statistics: bool,
    ) -> tuple[Tensor, Tensor | None]:
        cast = cast_weight(weight)
        ctx.save_for_backward(x, weight, cast, norm_weight, norm_bias, terms)
        ctx.activation = activation
        ctx.set_materialize_grads(False)
        with torch.cuda.device_of(x):
            y, partial = pointwise_forward(x, cast, made, terms, activation, statistics)
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
            return (None,) * 8
        x, weight, cast, norm_weight, norm_bias, terms = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        norm_gradients: list[Tensor | None] = [None, None]
        x_gradient = weight_gradient = None
        if terms is not None:
            dz, partial = pointwise_input_gradient(x, dy, cast, terms, ctx.activation)
            x_gradient, *norm_gradients = gradients_through_norm(
                x, dz, partial, terms, norm_weight, norm_bias, "none"
            )
        elif ctx.needs_input_grad[0]:
            active = cast[: dy.shape[1], : x.shape[1], 0, 0].to(dy.dtype)
            x_gradient = (dy.permute(0, 2, 3, 1) @ active).permute(0, 3, 1, 2)
        if ctx.needs_input_grad[1]:
            found = pointwise_weight_gradient(x, dy, weight, terms, ctx.activation)
            weight_gradient = added_to_sum(weight, found)
        return x_gradient, weight_gradient, *norm_gradients, *(None,) * 4


def pointwise_conv2d_with_statistics(
    x: Tensor,
    weight: Tensor,
    made: int,
    norm: DeferredNorm | None = None,
    statistics: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Convolve ``x``, possibly normalised, with filters of one pixel.

    Args:
        x: channels-last input of C channels. Under autocast it is cast, as for any convolution.
        weight: ``(filters, channels, 1, 1)``; of the first ``made`` filters, the first C channels
            are read in place and cast to the type of ``x``.
        made: the number of filters used, from the first.
        norm: normalises and activates ``x`` while it is read; see :func:`deferred_norm`.
        statistics: whether to return statistics of parts of the output, which
            :func:`batch_norm_act` and :func:`deferred_norm` take as ``partial``.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    obstacle = obstacle_to_pointwise_conv2d(x, weight, made)
    if obstacle is not None:
        raise AnywidthError(
            f"pointwise_conv2d: {obstacle}. Ask supports_pointwise_conv2d first and "
            "fall back to torch.nn.functional.conv2d."
        )
    statistics = statistics and x.numel() // x.shape[1] > batch_norm_small.MOST_PIXELS
    first: tuple[Any, ...] = (None, None, None, "none")
    if norm is not None:
        first = (norm.weight, norm.bias, norm.terms, norm.activation)
    y, partial = _PointwiseConv2d.apply(x, weight, *first, made, statistics)
    return y, partial
