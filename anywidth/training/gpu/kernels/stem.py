"""The convolution of an image as a differentiable function of a larger parameter."""

from typing import Any

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from anywidth.errors import AnywidthError
from anywidth.training.gpu.kernels import batch_norm_small
from anywidth.training.gpu.kernels.eligibility import obstacle_to_stem_conv2d
from anywidth.training.gpu.kernels.stem_convolution import (
    output_size,
    stem_forward,
    stem_weight_gradient,
)


class _StemConv2d(torch.autograd.Function):
    """The input is an image and has no gradient."""

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        channels: int,
        stride: int,
        padding: int,
        statistics: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        ctx.set_materialize_grads(False)
        with torch.cuda.device_of(x):
            y, partial = stem_forward(x, weight, channels, stride, padding, statistics)
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
            return (None,) * 6
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        return None, stem_weight_gradient(x, dy, weight, ctx.stride, ctx.padding), *(None,) * 4


def stem_conv2d_with_statistics(
    x: Tensor, weight: Tensor, channels: int, stride: int, padding: int, statistics: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Convolve an image: a dense 3x3 convolution with one to four input channels.

    Args:
        x: channels-last images without gradient. Under autocast they are cast, as for any
            convolution.
        weight: filters, ``(channels, x's channels, 3, 3)``, read in place and cast to the type of
            ``x``.
        channels: the number of filters used, from the first.
        stride: 1 or 2.
        padding: zeros added on every side, less than 3.
        statistics: whether to return statistics of parts of the output, which
            :func:`batch_norm_act` and :func:`deferred_norm` take as ``partial``.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    obstacle = obstacle_to_stem_conv2d(x, weight, channels, stride, padding)
    if obstacle is not None:
        raise AnywidthError(
            f"stem_conv2d: {obstacle}. Ask supports_stem_conv2d first and "
            "fall back to torch.nn.functional.conv2d."
        )
    height, width = output_size(x, stride, padding)
    is_measured = statistics and x.shape[0] * height * width > batch_norm_small.MOST_PIXELS
    y, partial = _StemConv2d.apply(x, weight, channels, stride, padding, is_measured)
    return y, partial
