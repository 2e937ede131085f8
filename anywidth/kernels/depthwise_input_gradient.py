"""Depthwise convolution, channels last: the gradient of its input."""

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

# By (kernel size, stride); columns are a multiple of the stride.
TILES = {
    (3, 1): Tile(columns=4, vector=4, ahead=1, positions=8, vectors=8, warps=2),
    (3, 2): Tile(columns=2, vector=4, ahead=2, positions=8, vectors=8, warps=2),
    (5, 1): Tile(columns=2, vector=2, ahead=2, positions=8, vectors=16),
    (5, 2): Tile(columns=4, vector=2, ahead=1, positions=8, vectors=16),
}
_SHORTEST_STRIP = 8
_PROGRAMS_A_MULTIPROCESSOR = 8


@triton.jit
def spread_row(
    sums,
    row,
    taps,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    RING: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEFTMOST: tl.constexpr,
):
    """What one row of ``dy`` gives to each of the input rows it reaches."""
    updated = ()
    for i in tl.static_range(RING * STRIDE):
        line = ()
        for t in tl.static_range(COLUMNS):
            total = sums[i][t]
            if i < KERNEL:
                for d in tl.static_range(KERNEL):
                    if (t + PADDING - d) % STRIDE == 0:
                        value = row[(t + PADDING - d) // STRIDE - LEFTMOST]
                        total += value.to(tl.float32) * taps[i * KERNEL + d]
            line = line + (total,)
        updated = updated + (line,)
    return updated


@compile_once
def depthwise_input_gradient_kernel(
    dy_ptr: tl.tensor,
    weight_slice_ptr: tl.tensor,
    dx_ptr: tl.tensor,
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
    """Walk down a strip: each step reads one row of ``dy`` and finishes a group of input rows.

    Row ``o`` of ``dy`` reaches the input rows from ``STRIDE * o - PADDING`` on, ``KERNEL`` of them:
    up to ``RING`` groups of ``STRIDE`` rows, whose sums are kept side by side.
    """
    RING: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE
    PHASE: tl.constexpr = PADDING % STRIDE
    LEFTMOST: tl.constexpr = -((KERNEL - 1 - PADDING) // STRIDE)
    SPAN: tl.constexpr = (COLUMNS - 1 + PADDING) // STRIDE - LEFTMOST + 1
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
    left = tile * (COLUMNS // STRIDE) + LEFTMOST
    readable = columns_inside(left, out_width, works, channel < channels, SPAN, ALIGNED)
    writable = columns_inside(tile * COLUMNS, width, works, channel < channels, COLUMNS, ALIGNED)

    first_row = strip * groups * STRIDE - PHASE
    last_row = tl.minimum(first_row + groups * STRIDE, height)
    first_row = tl.maximum(first_row, 0)
    group = strip * groups - RING + 1
    row = group + PADDING // STRIDE
    lane = (vector * VECTOR)[None, :, None] + tl.arange(0, VECTOR)[None, None, :]
    dy_offset = (((image * out_height + row) * out_width + left) * pixel)[:, :, None] + lane
    dx_row = group * STRIDE - PHASE
    dx_offset = (((image * height + dx_row) * width + tile * COLUMNS) * pixel)[:, :, None] + lane

    line = out_width * pixel
    window = load_rows(dy_ptr, dy_offset, row, out_height, line, pixel, readable, AHEAD, SPAN)
    nothing = repeat(tl.zeros((POSITIONS, VECTORS, VECTOR), tl.float32), COLUMNS)
    sums = repeat(nothing, RING * STRIDE)
    for _ in range(tl.cdiv(groups + RING - 1, RING)):
        for _unrolled in tl.static_range(RING):
            window = window + load_rows(
                dy_ptr,
                dy_offset + AHEAD * line,
                row + AHEAD,
                out_height,
                line,
                pixel,
                readable,
                1,
                SPAN,
            )
            sums = spread_row(
                sums, window[0], taps, KERNEL, STRIDE, PADDING, RING, COLUMNS, LEFTMOST
            )
            for r in tl.static_range(STRIDE):
                done = (dx_row + r >= first_row) & (dx_row + r < last_row)
                for t in tl.static_range(COLUMNS):
                    value = sums[r][t].to(dx_ptr.dtype.element_ty)
                    place = dx_ptr + (dx_offset + (r * width + t) * pixel)
                    tl.store(place, value, mask=writable[t] & done)
            sums = sums[STRIDE:] + repeat(nothing, STRIDE)
            window = window[1:]
            dy_offset += line
            dx_offset += STRIDE * width * pixel
            row += 1
            dx_row += STRIDE


def depthwise_input_gradient(
    dy: Tensor, weight: Tensor, input_shape: torch.Size, stride: int, padding: int
) -> Tensor:
    """The gradient of the input, given that of the output."""
    images, channels, height, width = input_shape
    kernel = weight.shape[2]
    dx = torch.empty(
        input_shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last
    )
    tile = TILES[kernel, stride]
    vectors = ceil_divide(channels, tile.vector)
    folds = choose_folds(vectors, tile.vectors)
    tiles = ceil_divide(width, tile.columns)
    blocks_of_vectors = ceil_divide(vectors * folds, tile.vectors)
    programs = blocks_of_vectors * ceil_divide(images * tiles, folds * tile.positions)
    wanted = _PROGRAMS_A_MULTIPROCESSOR * multiprocessors(dy.device)
    all_groups = ceil_divide(height + padding % stride, stride)
    strips = choose_strips(programs, all_groups, _SHORTEST_STRIP, wanted)
    depthwise_input_gradient_kernel[(programs * strips,)](
        dy,
        weight,
        dx,
        images,
        height,
        width,
        dy.shape[2],
        dy.shape[3],
        channels,
        vectors,
        folds,
        tiles,
        blocks_of_vectors,
        strips,
        ceil_divide(all_groups, strips),
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
    return dx
