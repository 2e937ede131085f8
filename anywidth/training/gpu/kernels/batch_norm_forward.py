"""Batch norm in training, fused with its activation, channels last: the output.

Three launches: partial sums over the pixels (reads x), the statistics of each channel (small), and
normalise and activate (reads x, writes y).
"""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from anywidth.training.gpu.kernels.activations import activate
from anywidth.training.gpu.kernels.batch_norm_layout import (
    PARTIAL_BLOCKS,
    PARTIAL_COLUMNS,
    Layout,
    add_partial_rows,
    columns_of_block,
)
from anywidth.training.gpu.kernels.compilation import compile_once
from anywidth.training.gpu.kernels.launch_blocks import ceil_divide
from anywidth.training.gpu.kernels.norm_arguments import BatchNorm

# Mean, variance, inverse deviation, scale and shift per channel, one row each.
TERMS = 5
_SUM_ROWS = 64
_SUM_PROGRAMS = 4
_NORMALIZE_ROWS = 64
_NORMALIZE_PROGRAMS = 16


@compile_once
def sum_kernel(
    x_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    pixels: int,
    channels: int,
    folds: int,
    rows: int,
    blocks: int,
    parts: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Sums and sums of squares over this program's rows, of the distance to the first pixel.

    A channel's first pixel is near its mean, which keeps the variance exact when the mean is large.
    """
    part = tl.program_id(0) // blocks
    column, channel, pixel = columns_of_block(tl.program_id(0) % blocks, channels, COLUMNS, ALIGNED)
    length = folds * pixel
    origin = tl.load(x_ptr + channel)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(part * ROWS, rows, parts * ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None] * length + column[None, :]
        inside = (column < length)[None, :] & (offset < pixels * pixel)
        value = tl.load(x_ptr + offset, mask=inside, other=origin)
        distance = value.to(tl.float32) - origin.to(tl.float32)
        sums += distance
        squares += distance * distance
    offset = part * length + column
    tl.store(partial_ptr + offset, tl.sum(sums, axis=0), mask=column < length)
    tl.store(partial_ptr + parts * length + offset, tl.sum(squares, axis=0), mask=column < length)


@triton.jit
def store_terms(
    sums,
    squares,
    origin,
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
    TRACKED: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """From sums of distances to ``origin``: the terms of each channel, and running statistics.

    Returns the mean, scale and shift that normalise a channel.
    """
    inside = channel < channels
    count = pixels * 1.0
    distance = sums / count
    mean = origin + distance
    spread = squares / count - distance * distance
    variance = tl.where(spread < 0, 0.0, spread)
    inverse_deviation = 1.0 / tl.sqrt_rn(variance + eps)
    weight = tl.load(weight_slice_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_slice_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    scale = weight * inverse_deviation
    tl.store(terms_ptr + channel, mean, mask=inside)
    tl.store(terms_ptr + channels + channel, variance, mask=inside)
    tl.store(terms_ptr + 2 * channels + channel, inverse_deviation, mask=inside)
    tl.store(terms_ptr + 3 * channels + channel, scale, mask=inside)
    tl.store(terms_ptr + 4 * channels + channel, bias, mask=inside)
    if TRACKED:
        unbiased = variance * (count / (count - 1))
        old_mean = tl.load(running_mean_slice_ptr + channel, mask=inside, other=0.0)
        old_var = tl.load(running_var_slice_ptr + channel, mask=inside, other=0.0)
        new_mean = old_mean + momentum * (mean - old_mean)
        new_var = old_var + momentum * (unbiased - old_var)
        tl.store(running_mean_slice_ptr + channel, new_mean, mask=inside)
        tl.store(running_var_slice_ptr + channel, new_var, mask=inside)
    if COUNTED and tl.program_id(0) == 0:
        tl.store(batches_slice_ptr, tl.load(batches_slice_ptr) + 1)
    return mean, scale, bias


@compile_once
def statistics_kernel(
    partial_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_slice_ptr: tl.tensor,
    bias_slice_ptr: tl.tensor,
    running_mean_slice_ptr: tl.tensor,
    running_var_slice_ptr: tl.tensor,
    batches_slice_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    rows: int,
    pixels: int,
    channels: int,
    momentum: float,
    eps: float,
    TRACKED: tl.constexpr,
    COUNTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Mean and variance of each channel, and the terms that normalise it; running statistics."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    sums = add_partial_rows(partial_ptr, channel, rows, channels, ROWS, COLUMNS)
    squares = add_partial_rows(
        partial_ptr + rows * channels, channel, rows, channels, ROWS, COLUMNS
    )
    origin = tl.load(x_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    store_terms(
        sums,
        squares,
        origin,
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


@compile_once
def merge_kernel(
    partial_ptr: tl.tensor,
    weight_slice_ptr: tl.tensor,
    bias_slice_ptr: tl.tensor,
    running_mean_slice_ptr: tl.tensor,
    running_var_slice_ptr: tl.tensor,
    batches_slice_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    rows: int,
    pixels: int,
    channels: int,
    momentum: float,
    eps: float,
    TRACKED: tl.constexpr,
    COUNTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The same from counts, means and squared deviations of the parts of a batch."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    totals = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (channel < channels)[None, :]
        place = partial_ptr + row[:, None] * channels + channel[None, :]
        count = tl.load(place, mask=inside, other=0.0)
        totals += count * tl.load(place + rows * channels, mask=inside, other=0.0)
    mean = tl.sum(totals, axis=0) / (pixels * 1.0)
    deviations = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (channel < channels)[None, :]
        place = partial_ptr + row[:, None] * channels + channel[None, :]
        count = tl.load(place, mask=inside, other=0.0)
        apart = tl.load(place + rows * channels, mask=inside, other=0.0) - mean[None, :]
        own = tl.load(place + 2 * rows * channels, mask=inside, other=0.0)
        deviations += own + count * apart * apart
    store_terms(
        mean * 0.0,
        tl.sum(deviations, axis=0),
        mean,
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


@compile_once
def normalize_kernel(
    x_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    y_ptr: tl.tensor,
    other_ptr: tl.tensor,
    pixels: int,
    channels: int,
    folds: int,
    rows: int,
    blocks: int,
    parts: int,
    ACTIVATION: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Normalise, add another tensor if ``ADDED``, and activate.

    From the last rows up: those are still in the cache.
    """
    part = tl.program_id(0) // blocks
    column, channel, pixel = columns_of_block(tl.program_id(0) % blocks, channels, COLUMNS, ALIGNED)
    length = folds * pixel
    mean = tl.load(terms_ptr + channel)[None, :]
    scale = tl.load(terms_ptr + 3 * pixel + channel)[None, :]
    shift = tl.load(terms_ptr + 4 * pixel + channel)[None, :]
    for start in range(part * ROWS, rows, parts * ROWS):
        row = rows - 1 - start - tl.arange(0, ROWS)
        offset = row[:, None] * length + column[None, :]
        inside = (row >= 0)[:, None] & (column < length)[None, :] & (offset < pixels * pixel)
        value = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        value = (value - mean) * scale + shift
        if ADDED:
            value += tl.load(other_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        value = activate(value, ACTIVATION)
        tl.store(y_ptr + offset, value.to(y_ptr.dtype.element_ty), mask=inside)


def batch_terms(x: Tensor, norm: BatchNorm) -> Tensor:
    """The terms of each channel; also updates the running statistics if given."""
    layout = Layout.of(x)
    parts = layout.parts(_SUM_ROWS, _SUM_PROGRAMS)
    partial = torch.empty(
        (2, parts, layout.folds, layout.channels), dtype=torch.float32, device=x.device
    )
    terms = torch.empty((TERMS, layout.channels), dtype=torch.float32, device=x.device)
    sum_kernel[(layout.blocks * parts,)](
        x, partial, *layout.sizes(parts), **layout.constants(_SUM_ROWS)
    )
    statistics_kernel[(ceil_divide(layout.channels, PARTIAL_COLUMNS),)](
        *(partial, x, norm.weight, norm.bias),
        *running_or(terms, norm),
        terms,
        *(parts * layout.folds, layout.pixels, layout.channels),
        **norm_options(norm),
        **PARTIAL_BLOCKS,
    )
    return terms


def merged_terms(partial: Tensor, pixels: int, norm: BatchNorm) -> Tensor:
    """Like :func:`batch_terms`, from statistics of parts of the batch."""
    _, rows, channels = partial.shape
    terms = torch.empty((TERMS, channels), dtype=torch.float32, device=partial.device)
    merge_kernel[(ceil_divide(channels, PARTIAL_COLUMNS),)](
        *(partial, norm.weight, norm.bias),
        *running_or(terms, norm),
        terms,
        *(rows, pixels, channels),
        **norm_options(norm),
        **PARTIAL_BLOCKS,
    )
    return terms


def normalize_and_activate(
    x: Tensor, terms: Tensor, activation: str, other: Tensor | None = None
) -> Tensor:
    """``x`` normalised by the terms of its channels, plus ``other`` if it is given, activated."""
    layout = Layout.of(x)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    parts = layout.parts(_NORMALIZE_ROWS, _NORMALIZE_PROGRAMS)
    normalize_kernel[(layout.blocks * parts,)](
        *(x, terms, y, x if other is None else other),
        *layout.sizes(parts),
        ACTIVATION=activation,
        ADDED=other is not None,
        **layout.constants(_NORMALIZE_ROWS),
    )
    return y


def norm_options(norm: BatchNorm) -> dict[str, float]:
    """The numbers of a norm, as arguments of the kernels."""
    return {
        "momentum": norm.momentum,
        "eps": norm.eps,
        "TRACKED": norm.running_mean is not None,
        "COUNTED": norm.num_batches_tracked is not None,
    }


def running_or(unused: Tensor, norm: BatchNorm) -> list[Tensor]:
    """The running statistics, or an unused tensor in their place if there are none."""
    given = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return [unused if tensor is None else tensor for tensor in given]
