"""Depthwise convolution, channels last: the output."""

# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton knows no unpacking)

import torch
import triton
import triton.language as tl
from torch import Tensor

from anywidth.kernels.compilation import compile_once
from anywidth.kernels.depthwise_tiles import (
    Tile,
    columns_inside,
    load_rows,
    load_taps,
    locate,
    repeat,
    stride_between_pixels,
)
from anywidth.kernels.tiling import ceil_divide, choose_folds, choose_strips, multiprocessors

# By (kernel size, stride).
TILES = {
    (3, 1): Tile(columns=4, vector=4, ahead=1, positions=8, vectors=8, warps=2),
    (3, 2): Tile(columns=4, vector=4, ahead=1, positions=8, vectors=8, warps=2),
    (5, 1): Tile(columns=2, vector=2, ahead=2, positions=8, vectors=16),
    (5, 2): Tile(columns=2, vector=2, ahead=1, positions=8, vectors=16),
}
_SHORTEST_STRIP = 8
_PROGRAMS_A_MULTIPROCESSOR = 8


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
    """What the first ``STRIDE`` rows of the window give to each of the ``RING`` output rows."""
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


@compile_once
def depthwise_forward_kernel(
    x_ptr: tl.tensor,
    weight_slice_ptr: tl.tensor,
    y_ptr: tl.tensor,
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
    weight_channel: int,
    weight_row: int,
    weight_column: int,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    AHEAD: tl.constexpr,
    POSITIONS: tl.constexpr,
    VECTORS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Walk down a strip: step ``s`` reads ``STRIDE`` input rows and finishes one output row.

    An input row takes part in up to ``RING`` output rows, whose sums are kept side by side.
    """
    RING: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE
    SPAN: tl.constexpr = (COLUMNS - 1) * STRIDE + KERNEL
    program = tl.program_id(0)
    strip = (program // blocks_of_vectors) % strips
    image, tile, vector, works = locate(
        program // (blocks_of_vectors * strips),
        program % blocks_of_vectors,
        images,
        tiles,
        vectors,
        folds,
        POSITIONS,
        VECTORS,
    )
    channel = vector[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    taps = load_taps(
        weight_slice_ptr, channel, channels, weight_channel, weight_row, weight_column, KERNEL
    )
    pixel = stride_between_pixels(channels, vectors, VECTOR, ALIGNED)
    left = tile * (COLUMNS * STRIDE) - PADDING
    readable = columns_inside(left, width, works, channel < channels, SPAN, ALIGNED)
    writable = columns_inside(
        tile * COLUMNS, out_width, works, channel < channels, COLUMNS, ALIGNED
    )

    out_row = strip * rows - RING + 1
    first_row = strip * rows
    last_row = tl.minimum(first_row + rows, out_height)
    row = first_row * STRIDE - PADDING
    lane = (vector * VECTOR)[None, :, None] + tl.arange(0, VECTOR)[None, None, :]
    x_offset = (((image * height + row) * width + left) * pixel)[:, :, None] + lane
    y_offset = (((image * out_height + out_row) * out_width + tile * COLUMNS) * pixel)[
        :, :, None
    ] + lane

    line = width * pixel
    window = load_rows(x_ptr, x_offset, row, height, line, pixel, readable, AHEAD * STRIDE, SPAN)
    nothing = repeat(tl.zeros((POSITIONS, VECTORS, VECTOR), tl.float32), COLUMNS)
    sums = repeat(nothing, RING)
    for _ in range(tl.cdiv(last_row - out_row, RING)):
        for _unrolled in tl.static_range(RING):
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
            sums = add_rows(sums, window, taps, KERNEL, STRIDE, RING, COLUMNS)
            done = (out_row >= first_row) & (out_row < last_row)
            for t in tl.static_range(COLUMNS):
                value = sums[0][t].to(y_ptr.dtype.element_ty)
                tl.store(y_ptr + (y_offset + t * pixel), value, mask=writable[t] & done)
            sums = sums[1:] + (nothing,)
            window = window[STRIDE:]
            x_offset += STRIDE * line
            y_offset += out_width * pixel
            row += STRIDE
            out_row += 1


def depthwise_forward(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Convolve every channel of ``x`` with its own filter among the first of ``weight``."""
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
    vectors = ceil_divide(channels, tile.vector)
    folds = choose_folds(vectors, tile.vectors)
    tiles = ceil_divide(out_width, tile.columns)
    blocks_of_vectors = ceil_divide(vectors * folds, tile.vectors)
    programs = blocks_of_vectors * ceil_divide(images * tiles, folds * tile.positions)
    wanted = _PROGRAMS_A_MULTIPROCESSOR * multiprocessors(x.device)
    strips = choose_strips(programs, out_height, _SHORTEST_STRIP, wanted)
    depthwise_forward_kernel[(programs * strips,)](
        x,
        weight,
        y,
        images,
        height,
        width,
        out_height,
        out_width,
        channels,
        vectors,
        folds,
        tiles,
        blocks_of_vectors,
        strips,
        ceil_divide(out_height, strips),
        weight.stride(0),
        weight.stride(2),
        weight.stride(3),
        KERNEL=kernel,
        STRIDE=stride,
        PADDING=padding,
        COLUMNS=tile.columns,
        VECTOR=tile.vector,
        AHEAD=tile.ahead,
        POSITIONS=tile.positions,
        VECTORS=tile.vectors,
        ALIGNED=channels % tile.vector == 0,
        num_warps=tile.warps,
    )
    return y
