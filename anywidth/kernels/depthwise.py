"""Depthwise convolution as a differentiable function of its input and of a larger parameter."""

from typing import Any

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from anywidth.errors import AnywidthError
from anywidth.kernels.depthwise_forward import depthwise_forward
from anywidth.kernels.depthwise_input_gradient import depthwise_input_gradient
from anywidth.kernels.depthwise_weight_gradient import depthwise_weight_gradient
from anywidth.kernels.eligibility import obstacle_to_depthwise_conv2d


class _DepthwiseConv2d(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        with torch.cuda.device_of(x):
            return depthwise_forward(x, weight, stride, padding)

    @staticmethod
    @once_differentiable
    @custom_bwd(device_type="cuda")
    def backward(  # type: ignore[override]
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = depthwise_input_gradient(dy, weight, x.shape, ctx.stride, ctx.padding)
        if ctx.needs_input_grad[1]:
            weight_gradient = depthwise_weight_gradient(x, dy, weight, ctx.stride, ctx.padding)
        return x_gradient, weight_gradient, None, None


def depthwise_conv2d(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """See :func:`anywidth.kernels.depthwise_conv2d`."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    obstacle = obstacle_to_depthwise_conv2d(x, weight, stride, padding)
    if obstacle is not None:
        raise AnywidthError(
            f"depthwise_conv2d: {obstacle}. Ask supports_depthwise_conv2d first and "
            "fall back to torch.nn.functional.conv2d."
        )
    output: Tensor = _DepthwiseConv2d.apply(x, weight, stride, padding)
    return output
