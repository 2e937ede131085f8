"""Depthwise convolution, channels last: the gradients of its input and of its filters, at once.

Both need the same neighbourhood of ``dy``, which is read once. If the convolution normalised and
activated its input while reading, this is repeated here, and the sums for the norm's own gradients
are computed as well.

Sums over pixels are partial here; see :mod:`anywidth.training.gpu.kernels.partial_sums`.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton knows no unpacking)

import torch
import triton
import triton.language as tl
from torch import Tensor

from anywidth.training.gpu.kernels.activations import activate, through_activation
from anywidth.training.gpu.kernels.compilation import compile_once
from anywidth.training.gpu.kernels.depthwise_tiles import (
    Launch,
    Tile,
    columns_inside,
    load_rows,
    load_taps,
    load_terms,
    locate,
    repeat,
    stride_between_pixels,
)
from anywidth.training.gpu.kernels.launch_blocks import ceil_divide, choose_parts
from anywidth.training.gpu.kernels.partial_sums import add_partial_sums, gradient_of

# By (kernel size, stride); columns are a multiple of the stride.
TILES = {
    (3, 1): Tile(columns=8, vector=2, ahead=1, positions=8, vectors=16),
    (3, 2): Tile(columns=4, vector=4, ahead=1, positions=4, vectors=16, warps=2),
    (5, 1): Tile(columns=2, vector=2, ahead=1, positions=8, vectors=16),
    (5, 2): Tile(columns=2, vector=2, ahead=1, positions=8, vectors=16),
}


@triton.jit
def spread_back(
    window,
    taps,
    nothing,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    RING: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEFTMOST: tl.constexpr,
):
    """The gradient of a group of ``STRIDE`` input rows, from the rows of ``dy`` it reaches."""
    found = ()
    for r in tl.static_range(STRIDE):
        line = ()
        for t in tl.static_range(COLUMNS):
            total = nothing
            for i in tl.static_range(KERNEL):
                if i >= r and (i - r) % STRIDE == 0:
                    for d in tl.static_range(KERNEL):
                        if (t + PADDING - d) % STRIDE == 0:
                            row = window[RING - 1 - (i - r) // STRIDE]
                            dy = row[(t + PADDING - d) // STRIDE - LEFTMOST]
                            total += dy.to(tl.float32) * taps[i * KERNEL + d]
            line = line + (total,)
        found = found + (line,)
    return found


@triton.jit
def add_products(
    sums,
    window,
    inputs,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    RING: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEFTMOST: tl.constexpr,
):
    """Add the products of a group of input rows and their rows of ``dy`` to every tap."""
    updated = ()
    for i in tl.static_range(KERNEL):
        for d in tl.static_range(KERNEL):
            total = sums[i * KERNEL + d]
            for r in tl.static_range(STRIDE):
                if i >= r and (i - r) % STRIDE == 0:
                    for t in tl.static_range(COLUMNS):
                        if (t + PADDING - d) % STRIDE == 0:
                            row = window[RING - 1 - (i - r) // STRIDE]
                            dy = row[(t + PADDING - d) // STRIDE - LEFTMOST]
                            total += dy.to(tl.float32) * inputs[r][t]
            updated = updated + (total,)
    return updated


@compile_once
def depthwise_gradients_kernel(
    x_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    weight_slice_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    norm_partial_ptr: tl.tensor,
    images: int,
    height: int,
    width: int,
    out_height: int,
    out_width: int,
    channels: int,
    vectors: int,
    folds: int,
    tiles: int,
    blocks_of_vectors: int,
    strips: int,
    groups: int,
    items: int,
    parts: int,
    weight_channel: int,
    weight_row: int,
    weight_column: int,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    NORMED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    AHEAD: tl.constexpr,
    POSITIONS: tl.constexpr,
    VECTORS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Walk down strips of the images: each step finishes a group of ``STRIDE`` input rows.

    Group ``g`` starts at row ``STRIDE * g - PHASE`` and depends on the ``RING`` rows of ``dy`` up
    to ``g + PADDING // STRIDE``. With ``NORMED``, ``dx`` is the gradient of the normalised and
    activated input, and the norm's sums are computed: of the gradient before the activation,
    ``dz``, and of ``dz * (x - mean)``.
    """
    RING: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE
    PHASE: tl.constexpr = PADDING % STRIDE
    LEFTMOST: tl.constexpr = -((KERNEL - 1 - PADDING) // STRIDE)
    SPAN: tl.constexpr = (COLUMNS - 1 + PADDING) // STRIDE - LEFTMOST + 1
    program = tl.program_id(0)
    block_of_vectors = program % blocks_of_vectors
    part = program // blocks_of_vectors
    place = block_of_vectors * VECTORS + tl.arange(0, VECTORS)
    channel = (place % vectors)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    taps = load_taps(
        weight_slice_ptr, channel, channels, weight_channel, weight_row, weight_column, KERNEL
    )
    pixel = stride_between_pixels(channels, vectors, VECTOR, ALIGNED)
    line = width * pixel
    out_line = out_width * pixel
    nothing = tl.zeros((POSITIONS, VECTORS, VECTOR), tl.float32)
    sums = repeat(nothing, KERNEL * KERNEL)
    if NORMED:
        mean, scale, shift = load_terms(terms_ptr, channel, channels)
        norm_sums = nothing
        norm_products = nothing
    for item in range(part, items, parts):
        image, tile, vector, works = locate(
            item // strips, block_of_vectors, images, tiles, vectors, folds, POSITIONS, VECTORS
        )
        left = tile * (COLUMNS // STRIDE) + LEFTMOST
        readable = columns_inside(left, out_width, works, channel < channels, SPAN, ALIGNED)
        used = columns_inside(tile * COLUMNS, width, works, channel < channels, COLUMNS, ALIGNED)
        group = (item % strips) * groups
        x_row = group * STRIDE - PHASE
        last_row = tl.minimum(x_row + groups * STRIDE, height)
        row = group + PADDING // STRIDE - RING + 1
        lane = (vector * VECTOR)[None, :, None] + tl.arange(0, VECTOR)[None, None, :]
        x_offset = (((image * height + x_row) * width + tile * COLUMNS) * pixel)[:, :, None] + lane
        dy_offset = (((image * out_height + row) * out_width + left) * pixel)[:, :, None] + lane

        window = load_rows(
            dy_ptr, dy_offset, row, out_height, out_line, pixel, readable, RING - 1 + AHEAD, SPAN
        )
        coming = load_rows(
            x_ptr, x_offset, x_row, last_row, line, pixel, used, AHEAD * STRIDE, COLUMNS
        )
        for _ in range(groups):
            window = window + load_rows(
                dy_ptr,
                dy_offset + (RING - 1 + AHEAD) * out_line,
                row + RING - 1 + AHEAD,
                out_height,
                out_line,
                pixel,
                readable,
                1,
                SPAN,
            )
            coming = coming + load_rows(
                x_ptr,
                x_offset + AHEAD * STRIDE * line,
                x_row + AHEAD * STRIDE,
                last_row,
                line,
                pixel,
                used,
                STRIDE,
                COLUMNS,
            )
            found = spread_back(
                window, taps, nothing, KERNEL, STRIDE, PADDING, RING, COLUMNS, LEFTMOST
            )
            inputs = ()
            for r in tl.static_range(STRIDE):
                inside = (x_row + r >= 0) & (x_row + r < last_row)
                values = ()
                for t in tl.static_range(COLUMNS):
                    x = coming[r][t].to(tl.float32)
                    dx = found[r][t].to(dx_ptr.dtype.element_ty)
                    tl.store(
                        dx_ptr + (x_offset + (r * width + t) * pixel), dx, mask=used[t] & inside
                    )
                    if NORMED:
                        centered = x - mean
                        z = centered * scale + shift
                        x = tl.where(used[t] & inside, activate(z, ACTIVATION), 0.0)
                        dz = through_activation(dx.to(tl.float32), z, ACTIVATION)
                        dz = tl.where(used[t] & inside, dz, 0.0)
                        norm_sums += dz
                        norm_products += dz * centered
                    values = values + (x,)
                inputs = inputs + (values,)
            sums = add_products(
                sums, window, inputs, KERNEL, STRIDE, PADDING, RING, COLUMNS, LEFTMOST
            )
            window = window[1:]
            coming = coming[STRIDE:]
            x_offset += STRIDE * line
            dy_offset += out_line
            x_row += STRIDE
            row += 1

    inside = (place < folds * vectors)[:, None] & (channel < channels)
    row = part * folds + place // vectors
    for i in tl.static_range(KERNEL * KERNEL):
        offset = (row * (KERNEL * KERNEL) + i)[:, None] * pixel + channel
        tl.store(partial_ptr + offset, tl.sum(sums[i], axis=0), mask=inside)
    if NORMED:
        offset = row[:, None] * pixel + channel
        tl.store(norm_partial_ptr + offset, tl.sum(norm_sums, axis=0), mask=inside)
        offset += parts * folds * pixel
        tl.store(norm_partial_ptr + offset, tl.sum(norm_products, axis=0), mask=inside)


def depthwise_gradients(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    terms: Tensor | None = None,
    activation: str = "none",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of the convolution's input and of ``weight``, and the norm's partial sums.

    The gradient of ``weight`` is zero for unused channels; if a sum of gradients is kept, it is
    added there and not returned. With the ``terms`` of a norm, the gradient of the input is that of
    ``x`` normalised and activated, and the partial sums are for
    :func:`~anywidth.training.gpu.kernels.batch_norm_backward.gradients_through_norm`.
    """
    images, channels, height, width = x.shape
    kernel = weight.shape[2]
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    tile = TILES[kernel, stride]
    groups = ceil_divide(height + padding % stride, stride)
    launch = Launch.of(tile, images, channels, groups, width, x.device)
    folds = launch.folds
    parts = choose_parts(launch.blocks_of_vectors, launch.items, launch.wanted)
    partial = torch.empty(
        (parts, folds, kernel * kernel, channels), dtype=torch.float32, device=x.device
    )
    norm_partial = None
    if terms is not None:
        norm_partial = torch.empty(
            (2, parts * folds, channels), dtype=torch.float32, device=x.device
        )
    depthwise_gradients_kernel[(launch.blocks_of_vectors * parts,)](
        *(x, dy, weight, partial if terms is None else terms, dx, partial),
        partial if norm_partial is None else norm_partial,
        *(images, height, width, *dy.shape[2:], channels),
        *launch.sizes,
        parts,
        *(weight.stride(0), weight.stride(2), weight.stride(3)),
        KERNEL=kernel,
        STRIDE=stride,
        PADDING=padding,
        NORMED=terms is not None,
        ACTIVATION=activation,
        **tile.constants(channels),
    )
    return dx, add_partial_sums(partial, *gradient_of(weight)), norm_partial
