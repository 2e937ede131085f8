"""Depthwise convolution, channels last: the output.

While reading, the kernel can normalise the input by the terms of a batch norm and activate it;
while writing, it can compute the statistics for the batch norm after it. Both save passes over
memory.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton knows no unpacking)

import torch
import triton
import triton.language as tl
from torch import Tensor

from anywidth.training.gpu.kernels.activations import activate
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
from anywidth.training.gpu.kernels.launch_blocks import choose_parts

# By (kernel size, stride).
TILES = {
    (3, 1): Tile(columns=4, vector=2, ahead=1, positions=4, vectors=32),
    (3, 2): Tile(columns=4, vector=4, ahead=1, positions=4, vectors=16, warps=2),
    (5, 1): Tile(columns=2, vector=2, ahead=2, positions=8, vectors=16),
    (5, 2): Tile(columns=2, vector=2, ahead=1, positions=8, vectors=16),
}


@triton.jit
def add_rows(
    sums,
    window,
    taps,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    RING: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the first ``STRIDE`` rows of the window to each of the ``RING`` output rows."""
    updated = ()
    for j in tl.static_range(RING):
        line = ()
        for t in tl.static_range(COLUMNS):
            total = sums[j][t]
            for r in tl.static_range(STRIDE):
                if r + STRIDE * (RING - 1 - j) < KERNEL:
                    for d in tl.static_range(KERNEL):
                        tap = taps[(r + STRIDE * (RING - 1 - j)) * KERNEL + d]
                        total += window[r][t * STRIDE + d].to(tl.float32) * tap
            line = line + (total,)
        updated = updated + (line,)
    return updated


@triton.jit
def activated(
    window,
    row,
    height,
    columns,
    scale,
    shift,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The first ``ROWS`` rows of the window normalised and activated; padding stays zero."""
    rows = ()
    for r in tl.static_range(ROWS):
        inside = (row + r >= 0) & (row + r < height)
        values = ()
        for j in tl.static_range(COLUMNS):
            z = window[r][j].to(tl.float32) * scale + shift
            values = values + (tl.where(columns[j] & inside, activate(z, ACTIVATION), 0.0),)
        rows = rows + (values,)
    return rows


@triton.jit
def store_statistics(partial_ptr, row, rows, channel, pixel, inside, count, origin, sums, squares):
    """Store the count, mean and squared deviations of each channel over all lanes.

    Each lane sums distances to its own ``origin``, which keeps the variance exact if the mean is
    large.
    """
    count = count[:, :, None]
    some = tl.where(count > 0, count, 1.0)
    mean = origin + sums / some
    deviations = squares - sums * (sums / some)
    all_count = tl.sum(count + tl.zeros_like(sums), axis=0)
    all_some = tl.where(all_count > 0, all_count, 1.0)
    all_mean = tl.sum(mean * count, axis=0) / all_some
    apart = mean - all_mean[None, :, :]
    all_deviations = tl.sum(deviations + count * apart * apart, axis=0)
    offset = row[:, None] * pixel + channel
    tl.store(partial_ptr + offset, all_count, mask=inside)
    tl.store(partial_ptr + rows * pixel + offset, all_mean, mask=inside)
    tl.store(partial_ptr + 2 * rows * pixel + offset, all_deviations, mask=inside)


@compile_once
def depthwise_forward_kernel(
    x_ptr: tl.tensor,
    weight_slice_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    y_ptr: tl.tensor,
    partial_ptr: tl.tensor,
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
    rows: int,
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
    STATISTICS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    AHEAD: tl.constexpr,
    POSITIONS: tl.constexpr,
    VECTORS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Walk down strips: step ``s`` reads ``STRIDE`` input rows and finishes one output row.

    An input row contributes to up to ``RING`` output rows, whose sums are kept side by side. The
    statistics of a program's output are laid out as (3, parts * folds, channels).
    """
    RING: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE
    SPAN: tl.constexpr = (COLUMNS - 1) * STRIDE + KERNEL
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
    zero = tl.zeros((POSITIONS, VECTORS, VECTOR), tl.float32)
    nothing = repeat(zero, COLUMNS)
    if NORMED:
        mean, scale, shift = load_terms(terms_ptr, channel, channels)
        shift -= mean * scale
    if STATISTICS:
        count = tl.zeros((POSITIONS, VECTORS), tl.float32)
        origin = zero
        distances = zero
        squares = zero
    for item in range(part, items, parts):
        image, tile, vector, works = locate(
            item // strips, block_of_vectors, images, tiles, vectors, folds, POSITIONS, VECTORS
        )
        left = tile * (COLUMNS * STRIDE) - PADDING
        readable = columns_inside(left, width, works, channel < channels, SPAN, ALIGNED)
        writable = columns_inside(
            tile * COLUMNS, out_width, works, channel < channels, COLUMNS, ALIGNED
        )
        first_row = (item % strips) * rows
        last_row = tl.minimum(first_row + rows, out_height)
        out_row = first_row - RING + 1
        row = first_row * STRIDE - PADDING
        lane = (vector * VECTOR)[None, :, None] + tl.arange(0, VECTOR)[None, None, :]
        x_offset = (((image * height + row) * width + left) * pixel)[:, :, None] + lane
        y_offset = (((image * out_height + out_row) * out_width + tile * COLUMNS) * pixel)[
            :, :, None
        ] + lane
        if STATISTICS:
            columns = tl.minimum(COLUMNS, out_width - tile * COLUMNS)
            count += tl.where(works, columns * tl.maximum(last_row - first_row, 0), 0)

        window = load_rows(
            x_ptr, x_offset, row, height, line, pixel, readable, AHEAD * STRIDE, SPAN
        )
        sums = repeat(nothing, RING)
        for _ in range(last_row - out_row):
            window = window + load_rows(
                x_ptr,
                x_offset + AHEAD * STRIDE * line,
                row + AHEAD * STRIDE,
                height,
                line,
                pixel,
                readable,
                STRIDE,
                SPAN,
            )
            inputs = window
            if NORMED:
                inputs = activated(
                    window, row, height, readable, scale, shift, ACTIVATION, STRIDE, SPAN
                )
            sums = add_rows(sums, inputs, taps, KERNEL, STRIDE, RING, COLUMNS)
            done = (out_row >= first_row) & (out_row < last_row)
            for t in tl.static_range(COLUMNS):
                value = sums[0][t].to(y_ptr.dtype.element_ty)
                tl.store(y_ptr + (y_offset + t * pixel), value, mask=writable[t] & done)
                if STATISTICS:
                    value = value.to(tl.float32)
                    if t == 0:
                        is_first = (item == part) & (out_row == first_row)
                        origin = tl.where(is_first, value, origin)
                    distance = tl.where(writable[t] & done, value - origin, 0.0)
                    distances += distance
                    squares += distance * distance
            sums = sums[1:] + (nothing,)
            window = window[STRIDE:]
            x_offset += STRIDE * line
            y_offset += out_width * pixel
            row += STRIDE
            out_row += 1

    if STATISTICS:
        inside = (place < folds * vectors)[:, None] & (channel < channels)
        store_statistics(
            partial_ptr,
            part * folds + place // vectors,
            parts * folds,
            channel,
            pixel,
            inside,
            count,
            origin,
            distances,
            squares,
        )


def depthwise_forward(
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    terms: Tensor | None = None,
    activation: str = "none",
    statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Convolve every channel of ``x`` with its own filter among the first of ``weight``.

    With the ``terms`` of a batch norm, ``x`` is normalised and activated first. With
    ``statistics``, also returns the partial statistics that :func:`merged_terms` takes.
    """
    images, channels, height, width = x.shape
    kernel = weight.shape[2]
    out_height = (height + 2 * padding - kernel) // stride + 1
    out_width = (width + 2 * padding - kernel) // stride + 1
    y = torch.empty(
        (images, channels, out_height, out_width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    tile = TILES[kernel, stride]
    launch = Launch.of(tile, images, channels, out_height, out_width, x.device)
    parts, partial = launch.items, None
    if statistics:
        parts = choose_parts(launch.blocks_of_vectors, launch.items, launch.wanted)
        rows = parts * launch.folds
        partial = torch.empty((3, rows, channels), dtype=torch.float32, device=x.device)
    depthwise_forward_kernel[(launch.blocks_of_vectors * parts,)](
        *(x, weight, x if terms is None else terms, y, x if partial is None else partial),
        *(images, height, width, out_height, out_width, channels),
        *launch.sizes,
        parts,
        *(weight.stride(0), weight.stride(2), weight.stride(3)),
        KERNEL=kernel,
        STRIDE=stride,
        PADDING=padding,
        NORMED=terms is not None,
        ACTIVATION=activation,
        STATISTICS=statistics,
        **tile.constants(channels),
    )
    return y, partial
