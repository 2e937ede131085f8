"""Batch norm with its activation for few pixels: one launch forward, one backward.

A program goes over all pixels of a few channels twice: once for their sums, once to use them. With
few pixels this is faster than three launches that divide the pixels among programs.
"""

import torch
import triton.language as tl
from torch import Tensor

from anywidth.training.gpu.kernels.activations import activate, through_activation
from anywidth.training.gpu.kernels.batch_norm_backward import gradient_buffers, store_gradients
from anywidth.training.gpu.kernels.batch_norm_forward import (
    TERMS,
    norm_options,
    running_or,
    store_terms,
)
from anywidth.training.gpu.kernels.compilation import compile_once
from anywidth.training.gpu.kernels.launch_blocks import ceil_divide
from anywidth.training.gpu.kernels.norm_arguments import BatchNorm

MOST_PIXELS = 4096
_COLUMNS = 8


def has_few_pixels(x: Tensor) -> bool:
    """Whether one program handles all pixels of a channel, so that deferring gains nothing."""
    return x.numel() <= MOST_PIXELS * x.shape[1]


@compile_once
def small_forward_kernel(
    x_ptr: tl.tensor,
    weight_slice_ptr: tl.tensor,
    bias_slice_ptr: tl.tensor,
    running_mean_slice_ptr: tl.tensor,
    running_var_slice_ptr: tl.tensor,
    batches_slice_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    y_ptr: tl.tensor,
    pixels: int,
    channels: int,
    momentum: float,
    eps: float,
    TRACKED: tl.constexpr,
    COUNTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Statistics of a few channels, then their values normalised and activated."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Written so that the compiler sees the divisor, and that masks cover whole vectors.
    pixel = channels
    if ALIGNED:
        pixel = (channels // COLUMNS) * COLUMNS
    used = channel < pixel
    origin = tl.load(x_ptr + channel, mask=used, other=0.0)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, pixels, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < pixels)[:, None] & used[None, :]
        value = tl.load(
            x_ptr + row[:, None] * pixel + channel[None, :], mask=inside, other=origin[None, :]
        )
        distance = value.to(tl.float32) - origin.to(tl.float32)[None, :]
        sums += distance
        squares += distance * distance
    mean, scale, shift = store_terms(
        tl.sum(sums, axis=0),
        tl.sum(squares, axis=0),
        origin.to(tl.float32),
        channel,
        weight_slice_ptr,
        bias_slice_ptr,
        running_mean_slice_ptr,
        running_var_slice_ptr,
        batches_slice_ptr,
        terms_ptr,
        pixels,
        channels,
        momentum,
        eps,
        TRACKED,
        COUNTED,
    )
    for start in range(0, pixels, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None] * pixel + channel[None, :]
        inside = (row < pixels)[:, None] & used[None, :]
        value = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        value = activate((value - mean[None, :]) * scale[None, :] + shift[None, :], ACTIVATION)
        tl.store(y_ptr + offset, value.to(y_ptr.dtype.element_ty), mask=inside)


@compile_once
def small_backward_kernel(
    x_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    weight_gradient_ptr: tl.tensor,
    bias_gradient_ptr: tl.tensor,
    corrections_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    pixels: int,
    channels: int,
    all_channels: int,
    ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Gradients of weight and bias of a few channels, then of their inputs."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    pixel = channels
    if ALIGNED:
        pixel = (channels // COLUMNS) * COLUMNS
    used = channel < pixel
    mean = tl.load(terms_ptr + channel, mask=used, other=0.0)[None, :]
    scale = tl.load(terms_ptr + 3 * channels + channel, mask=used, other=0.0)[None, :]
    shift = tl.load(terms_ptr + 4 * channels + channel, mask=used, other=0.0)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, pixels, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None] * pixel + channel[None, :]
        inside = (row < pixels)[:, None] & used[None, :]
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        centered = x - mean
        dz = through_activation(dy, centered * scale + shift, ACTIVATION)
        sums += dz
        products += dz * centered
    average, slope = store_gradients(
        tl.sum(sums, axis=0),
        tl.sum(products, axis=0),
        channel,
        terms_ptr,
        weight_gradient_ptr,
        bias_gradient_ptr,
        corrections_ptr,
        pixels,
        channels,
        all_channels,
        ADDED,
    )
    for start in range(0, pixels, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None] * pixel + channel[None, :]
        inside = (row < pixels)[:, None] & used[None, :]
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        centered = x - mean
        dz = through_activation(dy, centered * scale + shift, ACTIVATION)
        dx = dz * scale - centered * slope[None, :] - average[None, :]
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def _constants(channels: int) -> dict[str, int]:
    return {
        "ROWS": 1024,
        "COLUMNS": _COLUMNS,
        "ALIGNED": channels % _COLUMNS == 0,
        "num_warps": 8,
    }


def small_forward(x: Tensor, norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """The activated output, and the terms of each channel."""
    channels = x.shape[1]
    terms = torch.empty((TERMS, channels), dtype=torch.float32, device=x.device)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    small_forward_kernel[(ceil_divide(channels, _COLUMNS),)](
        *(x, norm.weight, norm.bias),
        *running_or(terms, norm),
        *(terms, y, x.numel() // channels, channels),
        **norm_options(norm),
        ACTIVATION=norm.activation,
        **_constants(channels),
    )
    return y, terms


def small_backward(
    x: Tensor, dy: Tensor, terms: Tensor, weight: Tensor, bias: Tensor, activation: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``x``, weight and bias; None for those that were added to sums."""
    channels = x.shape[1]
    weight_gradient, bias_gradient, added = gradient_buffers(weight, bias)
    corrections = torch.empty((2, channels), dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    covered = channels if added else weight.shape[0]
    small_backward_kernel[(ceil_divide(covered, _COLUMNS),)](
        *(x, dy, terms, weight_gradient, bias_gradient, corrections, dx),
        *(x.numel() // channels, channels, weight.shape[0]),
        ADDED=added,
        ACTIVATION=activation,
        **_constants(channels),
    )
    if added:
        return dx, None, None
    return dx, weight_gradient, bias_gradient
