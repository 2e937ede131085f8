"""Fast convolutions: kernels for images and depthwise ones, matrix products for pointwise ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import RECORD
from anywidth.slimming.record import Record
from anywidth.training.gpu import kernels
from anywidth.training.gpu.fast_paths import (
    DEFERRED,
    PARTIAL,
    are_watched,
    fast_path,
    has,
    leave,
    reach,
    slowly,
    take,
)
from anywidth.training.gpu.kernels.eligibility import STEM_INPUT_CHANNELS, STEM_KERNEL_SIZE, STRIDES
from anywidth.training.gpu.kernels.shared_buffers import added_to_sum, cast_weight

USES_PRODUCTS = False
"""Whether pointwise convolutions of few channels have kernels. Not timed on a GPU yet:
`python3 -m benchmarks.our_step --products`."""


def is_depthwise(module: nn.Conv2d) -> bool:
    """Whether there is a kernel for this convolution."""
    return (
        _is_plain(module)
        and module.bias is None
        and 1 < module.groups == module.in_channels == module.out_channels
        and module.kernel_size in ((3, 3), (5, 5))
        and module.stride[0] in (1, 2)
    )


def is_pointwise(module: nn.Conv2d) -> bool:
    """Whether this convolution is a matrix product."""
    return (
        _is_plain(module)
        and module.groups == 1
        and module.kernel_size == (1, 1)
        and module.stride == (1, 1)
        and module.padding == (0, 0)
    )


def is_stem(module: nn.Conv2d) -> bool:
    """Whether this is a convolution of images for which there is a kernel."""
    return (
        _is_plain(module)
        and module.bias is None
        and module.groups == 1
        and module.in_channels in STEM_INPUT_CHANNELS
        and module.kernel_size == (STEM_KERNEL_SIZE, STEM_KERNEL_SIZE)
        and module.stride[0] in STRIDES
    )


def _is_plain(module: nn.Conv2d) -> bool:
    return (
        module._parameters.get("weight") is not None
        and module.dilation == (1, 1)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and module.padding[0] == module.padding[1]
        and module.stride[0] == module.stride[1]
    )


def depthwise_forward(self: Any, x: Tensor) -> Tensor:
    """A depthwise convolution's forward; it may also compute the norm before it."""
    if not reach(x):
        return slowly(self, x)
    deferred = _norm_before(self, x)
    x = _channels_last(x)
    if deferred is None and not is_taken(self, x):
        return slowly(self, x)
    made, partial = kernels.depthwise_conv2d_with_statistics(
        x, self._parameters["weight"], self.stride[0], self.padding[0], deferred, _is_measured(self)
    )
    if partial is not None:
        leave(made, PARTIAL, partial)
    return made


def _norm_before(convolution: Any, x: Tensor) -> kernels.DeferredNorm | None:
    """The norm of `x` that was left to a convolution."""
    deferred, path = take(x, DEFERRED), fast_path(convolution)
    if deferred is None and path is not None and path.awaits:
        raise AnywidthError(
            f"a convolution of {convolution.in_channels} channels expected the output of the batch "
            "norm before it, but got another tensor: the network does something in between that it "
            "did not do when it was traced. Train it with SandwichStep(..., kernels=False)"
        )
    if deferred is not None and path is not None:
        path.has_taken = True
    found: kernels.DeferredNorm | None = deferred
    return found


def stem_forward(self: Any, x: Tensor) -> Tensor:
    """The forward of a convolution of images."""
    record: Record = self.__dict__[RECORD]
    channels = record.cut("weight", 0)
    weight, place = self._parameters["weight"], (self.stride[0], self.padding[0])
    is_whole = record.cut("weight", 1) is None and record.scales.get("weight", 1) == 1
    if type(channels) is int and is_whole and reach(x):
        x = _channels_last(x)
        if kernels.supports_stem_conv2d(x, weight, channels, *place):
            made, partial = kernels.stem_conv2d_with_statistics(
                x, weight, channels, *place, _is_measured(self)
            )
            if partial is not None:
                leave(made, PARTIAL, partial)
            return made
    return slowly(self, x)


def _is_measured(convolution: Any) -> bool:
    """Whether a norm after a convolution takes statistics, and nothing comes between the two."""
    path = fast_path(convolution)
    after = None if path is None else path.norm_after
    return after is not None and after.training and not are_watched(convolution, after)


def is_taken(convolution: Any, x: Tensor) -> bool:
    """Whether a kernel can convolve a tensor."""
    if has(convolution, pointwise_forward):
        sizes = _product_sizes(convolution) if USES_PRODUCTS else None
        weight = convolution._parameters["weight"]
        return sizes is not None and kernels.supports_pointwise_conv2d(x, weight, sizes[0])
    is_cut = type(convolution.__dict__[RECORD].cut("weight", 0)) is int
    return is_cut and kernels.supports_depthwise_conv2d(
        x, convolution._parameters["weight"], convolution.stride[0], convolution.padding[0]
    )


def pointwise_forward(self: Any, x: Tensor) -> Tensor:
    """A pointwise convolution's forward; it may also compute the norm before it."""
    if not reach(x):
        return slowly(self, x)
    deferred = _norm_before(self, x)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    weight, sizes = self._parameters["weight"], _product_sizes(self)
    if deferred is not None or is_taken(self, x):
        assert sizes is not None
        made, partial = kernels.pointwise_conv2d_with_statistics(
            x, weight, sizes[0], deferred, _is_measured(self)
        )
        if partial is not None:
            leave(made, PARTIAL, partial)
        return made
    pixels = x.permute(0, 2, 3, 1)  # a view of channels-last memory
    if sizes is not None:
        result = product(pixels, weight, *sizes)
    else:
        result = nn.functional.linear(pixels, self.weight.flatten(1), self.bias)
    return result.permute(0, 3, 1, 2)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _product_sizes(convolution: Any) -> tuple[int, int] | None:
    """The active filters and channels if a pointwise convolution is a plain product."""
    record: Record = convolution.__dict__[RECORD]
    if record.scales.get("weight", 1.0) != 1.0 or convolution._parameters["bias"] is not None:
        return None
    filters, channels = convolution._parameters["weight"].shape[:2]
    made, read = record.cut("weight", 0), record.cut("weight", 1)
    made, read = filters if made is None else made, channels if read is None else read
    return (made, read) if type(made) is int and type(read) is int else None


def product(pixels: Tensor, weight: Tensor, made: int, read: int) -> Tensor:
    """The product of pixels with the first rows and columns of a weight, by the library."""
    result: Tensor = _Pointwise.apply(pixels, weight, made, read)
    return result


class _Pointwise(torch.autograd.Function):
    """A product with the first rows and columns of a weight, which writes its gradient directly.

    If autograd sliced the weight, it would fill and copy the whole gradient once per axis.
    """

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, weight: Tensor, made: int, read: int) -> Tensor:
        rows = pixels.reshape(-1, read)
        active = cast_weight(weight)[:made, :read, 0, 0].to(pixels.dtype)
        ctx.save_for_backward(rows, active, weight)
        ctx.pixels = pixels.shape
        return (rows @ active.t()).view(*pixels.shape[:-1], made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, active, weight = ctx.saved_tensors
        gradient = gradient.reshape(-1, active.shape[0]).to(rows.dtype)
        to_pixels = to_weight = None
        if ctx.needs_input_grad[0]:
            to_pixels = (gradient @ active).view(ctx.pixels)
        if ctx.needs_input_grad[1]:
            to_weight = added_to_sum(weight, gradient.t() @ rows)
        return to_pixels, to_weight, None, None
