"""Batch norm in training, fused with its activation, channels last: the gradients.

Three launches: partial sums over the pixels (reads x and dy), the gradients of weight and bias
(small), and the gradient of the input (reads x and dy, writes dx). The normalised input and the
activation's mask are computed again rather than stored.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from anywidth.training.gpu.kernels.activations import through_activation
from anywidth.training.gpu.kernels.batch_norm_layout import (
    PARTIAL_BLOCKS,
    PARTIAL_COLUMNS,
    Layout,
    add_partial_rows,
    columns_of_block,
)
from anywidth.training.gpu.kernels.compilation import compile_once
from anywidth.training.gpu.kernels.launch_blocks import ceil_divide
from anywidth.training.gpu.kernels.shared_buffers import gradient_sum

_SUM_ROWS = 32
_SUM_PROGRAMS = 4
_INPUT_ROWS = 128
_INPUT_PROGRAMS = 16


@compile_once
def gradient_sum_kernel(
    x_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    y_ptr: tl.tensor,
    dz_ptr: tl.tensor,
    pixels: int,
    channels: int,
    folds: int,
    rows: int,
    blocks: int,
    parts: int,
    ACTIVATION: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Sums over this program's rows of the gradient before the activation, ``dz``, and of
    ``dz * (x - mean)``.

    With ``MASKED`` the activation is ReLU, after a sum: its output ``y`` masks, and ``dz`` is
    written for the other tensor of the sum.
    """
    part = tl.program_id(0) // blocks
    column, channel, pixel = columns_of_block(tl.program_id(0) % blocks, channels, COLUMNS, ALIGNED)
    length = folds * pixel
    mean = tl.load(terms_ptr + channel)[None, :]
    scale = tl.load(terms_ptr + 3 * pixel + channel)[None, :]
    shift = tl.load(terms_ptr + 4 * pixel + channel)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(part * ROWS, rows, parts * ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None] * length + column[None, :]
        inside = (column < length)[None, :] & (offset < pixels * pixel)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        centered = x - mean
        if MASKED:
            y = tl.load(y_ptr + offset, mask=inside, other=0.0)
            dz = through_activation(dy, y, "relu")
            tl.store(dz_ptr + offset, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        else:
            dz = through_activation(dy, centered * scale + shift, ACTIVATION)
        sums += dz
        products += dz * centered
    offset = part * length + column
    tl.store(partial_ptr + offset, tl.sum(sums, axis=0), mask=column < length)
    tl.store(partial_ptr + parts * length + offset, tl.sum(products, axis=0), mask=column < length)


@triton.jit
def store_gradients(
    sums,
    products,
    channel,
    terms_ptr,
    weight_gradient_ptr,
    bias_gradient_ptr,
    corrections_ptr,
    pixels,
    channels,
    all_channels,
    ADDED: tl.constexpr,
):
    """The gradients of weight and bias; returns the average and slope that dx subtracts."""
    inside = channel < channels
    inverse_deviation = tl.load(terms_ptr + 2 * channels + channel, mask=inside, other=0.0)
    scale = tl.load(terms_ptr + 3 * channels + channel, mask=inside, other=0.0)
    weight_gradient = products * inverse_deviation
    count = pixels * 1.0
    average = scale * (sums / count)
    slope = scale * inverse_deviation * (weight_gradient / count)
    tl.store(corrections_ptr + channel, average, mask=inside)
    tl.store(corrections_ptr + channels + channel, slope, mask=inside)
    stored = channel < all_channels
    if ADDED:
        stored = inside
        weight_gradient += tl.load(weight_gradient_ptr + channel, mask=inside, other=0.0)
        sums += tl.load(bias_gradient_ptr + channel, mask=inside, other=0.0)
    weight_gradient = weight_gradient.to(weight_gradient_ptr.dtype.element_ty)
    tl.store(weight_gradient_ptr + channel, weight_gradient, mask=stored)
    tl.store(bias_gradient_ptr + channel, sums.to(bias_gradient_ptr.dtype.element_ty), mask=stored)
    return average, slope


@compile_once
def parameter_gradient_kernel(
    partial_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    weight_gradient_ptr: tl.tensor,
    bias_gradient_ptr: tl.tensor,
    corrections_ptr: tl.tensor,
    rows: int,
    pixels: int,
    channels: int,
    all_channels: int,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Gradients of weight and bias, zero beyond the active channels, and what dx subtracts.

    With ``ADDED`` they are added to the existing values, for the active channels only.
    """
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = add_partial_rows(partial_ptr, channel, rows, channels, ROWS, COLUMNS)
    products = add_partial_rows(
        partial_ptr + rows * channels, channel, rows, channels, ROWS, COLUMNS
    )
    store_gradients(
        sums,
        products,
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


@compile_once
def input_gradient_kernel(
    x_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    corrections_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    pixels: int,
    channels: int,
    folds: int,
    rows: int,
    blocks: int,
    parts: int,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """The gradient of the input, from the last rows up: those are still in the cache."""
    part = tl.program_id(0) // blocks
    column, channel, pixel = columns_of_block(tl.program_id(0) % blocks, channels, COLUMNS, ALIGNED)
    length = folds * pixel
    mean = tl.load(terms_ptr + channel)[None, :]
    scale = tl.load(terms_ptr + 3 * pixel + channel)[None, :]
    shift = tl.load(terms_ptr + 4 * pixel + channel)[None, :]
    average = tl.load(corrections_ptr + channel)[None, :]
    slope = tl.load(corrections_ptr + pixel + channel)[None, :]
    for start in range(part * ROWS, rows, parts * ROWS):
        row = rows - 1 - start - tl.arange(0, ROWS)
        offset = row[:, None] * length + column[None, :]
        inside = (row >= 0)[:, None] & (column < length)[None, :] & (offset < pixels * pixel)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        centered = x - mean
        dz = through_activation(dy, centered * scale + shift, ACTIVATION)
        dx = dz * scale - centered * slope - average
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def gradient_buffers(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The tensors for the gradients, and whether to add to them."""
    weight_sum, bias_sum = gradient_sum(weight), gradient_sum(bias)
    if weight_sum is not None and bias_sum is not None:
        return weight_sum, bias_sum, True
    weight_gradient = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    return weight_gradient, torch.empty(bias.shape, dtype=bias.dtype, device=bias.device), False


def parameter_gradients(
    x: Tensor,
    dy: Tensor,
    terms: Tensor,
    weight: Tensor,
    bias: Tensor,
    activation: str,
    masked: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Gradients of weight and bias, and the corrections that :func:`input_gradient` needs.

    If sums of both gradients are kept, they are added there and not returned. ``masked`` is the
    output of a ReLU after a sum, and where to write the gradient of the sum; then ``activation``,
    that of the norm itself, is none.
    """
    layout = Layout.of(x)
    parts = layout.parts(_SUM_ROWS, _SUM_PROGRAMS)
    partial = torch.empty(
        (2, parts, layout.folds, layout.channels), dtype=torch.float32, device=x.device
    )
    gradient_sum_kernel[(layout.blocks * parts,)](
        *(x, dy, terms, partial, *(masked or (x, x))),
        *layout.sizes(parts),
        ACTIVATION=activation,
        MASKED=masked is not None,
        **layout.constants(_SUM_ROWS),
    )
    rows = partial.view(2, parts * layout.folds, layout.channels)
    return finish_parameter_gradients(rows, layout.pixels, terms, weight, bias)


def finish_parameter_gradients(
    partial: Tensor, pixels: int, terms: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Like :func:`parameter_gradients`, from partial sums computed elsewhere."""
    _, rows, channels = partial.shape
    weight_gradient, bias_gradient, added = gradient_buffers(weight, bias)
    corrections = torch.empty((2, channels), dtype=torch.float32, device=partial.device)
    columns = channels if added else weight.shape[0]
    parameter_gradient_kernel[(ceil_divide(columns, PARTIAL_COLUMNS),)](
        *(partial, terms, weight_gradient, bias_gradient, corrections),
        *(rows, pixels, channels, weight.shape[0]),
        ADDED=added,
        **PARTIAL_BLOCKS,
    )
    if added:
        return None, None, corrections
    return weight_gradient, bias_gradient, corrections


def gradients_through_norm(
    x: Tensor,
    dy: Tensor,
    partial: Tensor,
    terms: Tensor,
    weight: Tensor,
    bias: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of ``x``, in the memory of ``dy``, and of a norm left to a convolution.

    ``partial`` are the sums that the convolution took on the way.
    """
    pixels = x.numel() // x.shape[1]
    weight_gradient, bias_gradient, corrections = finish_parameter_gradients(
        partial, pixels, terms, weight, bias
    )
    x_gradient = input_gradient(x, dy, terms, corrections, activation, in_place=True)
    return x_gradient, weight_gradient, bias_gradient


def input_gradient(
    x: Tensor,
    dy: Tensor,
    terms: Tensor,
    corrections: Tensor,
    activation: str,
    in_place: bool = False,
) -> Tensor:
    """The gradient of ``x`` from that of the activated output, whose memory it may reuse."""
    layout = Layout.of(x)
    dx = dy if in_place else torch.empty_like(x, memory_format=torch.channels_last)
    parts = layout.parts(_INPUT_ROWS, _INPUT_PROGRAMS)
    input_gradient_kernel[(layout.blocks * parts,)](
        *(x, dy, terms, corrections, dx),
        *layout.sizes(parts),
        ACTIVATION=activation,
        **layout.constants(_INPUT_ROWS),
    )
    return dx
