"""Depthwise convolution, channels last: the gradient of its filters.

Two stages without atomics, so that a gradient is the same bit for bit every time: programs write
partial sums over their share of the pixels, then a second kernel adds the partial sums.
"""

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
    locate,
    repeat,
    stride_between_pixels,
)
from anywidth.kernels.shared_buffers import gradient_sum
from anywidth.kernels.tiling import (
    ceil_divide,
    choose_folds,
    choose_parts,
    choose_strips,
    multiprocessors,
)

# By (kernel size, stride).
TILES = {
    (3, 1): Tile(columns=4, vector=4, ahead=1, positions=8, vectors=8, warps=2),
    (3, 2): Tile(columns=4, vector=2, ahead=1, positions=8, vectors=16),
    (5, 1): Tile(columns=2, vector=2, ahead=2, positions=8, vectors=16),
    (5, 2): Tile(columns=2, vector=2, ahead=1, positions=8, vectors=16),
}
_SHORTEST_STRIP = 14
_PROGRAMS_A_MULTIPROCESSOR = 4
_SUM_ROWS = 128
_SUM_COLUMNS = 8


@triton.jit
def add_products(
    sums,
    seen,
    window,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    RING: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add to every tap the products of the input rows at hand with the rows of ``dy`` they met."""
    updated = ()
    for i in tl.static_range(KERNEL * KERNEL):
        total = sums[i]
        for t in tl.static_range(COLUMNS):
            dy = seen[RING - 1 - (i // KERNEL) // STRIDE][t]
            x = window[(i // KERNEL) % STRIDE][t * STRIDE + i % KERNEL]
            total += dy.to(tl.float32) * x.to(tl.float32)
        updated = updated + (total,)
    return updated


@compile_once
def depthwise_weight_gradient_kernel(
    x_ptr: tl.tensor,
    dy_ptr: tl.tensor,
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
    """Add up ``dy * x`` for every tap over this program's strips of the images.

    Step ``s`` of a strip reads row ``s`` of ``dy`` and ``STRIDE`` rows of ``x``, which meet the
    ``RING`` last rows of ``dy``. Partial sums are laid out as (parts, folds, taps, channels).
    """
    RING: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE
    SPAN: tl.constexpr = (COLUMNS - 1) * STRIDE + KERNEL
    program = tl.program_id(0)
    block_of_vectors = program % blocks_of_vectors
    part = program // blocks_of_vectors
    pixel = stride_between_pixels(channels, vectors, VECTOR, ALIGNED)
    nothing = tl.zeros((POSITIONS, VECTORS, VECTOR), tl.float32)
    no_dy = tl.zeros((POSITIONS, VECTORS, VECTOR), dy_ptr.dtype.element_ty)
    sums = repeat(nothing, KERNEL * KERNEL)
    for item in range(part, items, parts):
        image, tile, vector, works = locate(
            item // strips, block_of_vectors, images, tiles, vectors, folds, POSITIONS, VECTORS
        )
        channel = vector[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        left = tile * (COLUMNS * STRIDE) - PADDING
        readable = columns_inside(left, width, works, channel < channels, SPAN, ALIGNED)
        reached = columns_inside(
            tile * COLUMNS, out_width, works, channel < channels, COLUMNS, ALIGNED
        )
        out_row = (item % strips) * rows
        last_row = tl.minimum(out_row + rows, out_height)
        row = out_row * STRIDE - PADDING
        lane = (vector * VECTOR)[None, :, None] + tl.arange(0, VECTOR)[None, None, :]
        x_offset = (((image * height + row) * width + left) * pixel)[:, :, None] + lane
        dy_offset = (((image * out_height + out_row) * out_width + tile * COLUMNS) * pixel)[
            :, :, None
        ] + lane

        line = width * pixel
        out_line = out_width * pixel
        window = load_rows(
            x_ptr, x_offset, row, height, line, pixel, readable, AHEAD * STRIDE, SPAN
        )
        seen = repeat(repeat(no_dy, COLUMNS), RING - 1) + load_rows(
            dy_ptr, dy_offset, out_row, last_row, out_line, pixel, reached, AHEAD, COLUMNS
        )
        for _ in range(tl.cdiv(rows + RING - 1, RING)):
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
                seen = seen + load_rows(
                    dy_ptr,
                    dy_offset + AHEAD * out_line,
                    out_row + AHEAD,
                    last_row,
                    out_line,
                    pixel,
                    reached,
                    1,
                    COLUMNS,
                )
                sums = add_products(sums, seen, window, KERNEL, STRIDE, RING, COLUMNS)
                seen = seen[1:]
                window = window[STRIDE:]
                x_offset += STRIDE * line
                dy_offset += out_line
                row += STRIDE
                out_row += 1

    position = block_of_vectors * VECTORS + tl.arange(0, VECTORS)
    vector = position % vectors
    channel = vector[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    inside = (position < folds * vectors)[:, None] & (channel < channels)
    row = part * folds + position // vectors
    for i in tl.static_range(KERNEL * KERNEL):
        offset = (row * (KERNEL * KERNEL) + i)[:, None] * pixel + channel
        tl.store(partial_ptr + offset, tl.sum(sums[i], axis=0), mask=inside)


@compile_once
def add_partial_sums_kernel(
    partial_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    rows: int,
    channels: int,
    all_channels: int,
    ADDED: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Add ``rows`` partial sums; channels beyond the active ones have no gradient.

    ``all_channels`` are covered. With ``ADDED`` the sums are added to what is there.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tap = column // all_channels
    channel = column % all_channels
    active = (tap < TAPS) & (channel < channels)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None] * (TAPS * channels) + (tap * channels + channel)[None, :]
        sums += tl.load(
            partial_ptr + offset, mask=(row < rows)[:, None] & active[None, :], other=0.0
        )
    total = tl.sum(sums, axis=0)
    place = gradient_ptr + channel * TAPS + tap
    if ADDED:
        total += tl.load(place, mask=active, other=0.0)
    tl.store(place, total.to(gradient_ptr.dtype.element_ty), mask=tap < TAPS)


def depthwise_weight_gradient(
    x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int
) -> Tensor | None:
    """The gradient of ``weight``, all of it: zero for the channels that were not used.

    Where a sum of gradients is kept it is added there, and none is returned.
    """
    images, channels, height, width = x.shape
    out_height, out_width = dy.shape[2:]
    kernel = weight.shape[2]
    tile = TILES[kernel, stride]
    vectors = ceil_divide(channels, tile.vector)
    folds = choose_folds(vectors, tile.vectors)
    tiles = ceil_divide(out_width, tile.columns)
    blocks_of_vectors = ceil_divide(vectors * folds, tile.vectors)
    blocks_of_positions = ceil_divide(images * tiles, folds * tile.positions)
    wanted = _PROGRAMS_A_MULTIPROCESSOR * multiprocessors(x.device)
    strips = choose_strips(
        blocks_of_vectors * blocks_of_positions, out_height, _SHORTEST_STRIP, wanted
    )
    items = blocks_of_positions * strips
    parts = choose_parts(blocks_of_vectors, items, wanted)
    partial = torch.empty(
        (parts, folds, kernel * kernel, channels), dtype=torch.float32, device=x.device
    )
    depthwise_weight_gradient_kernel[(blocks_of_vectors * parts,)](
        x,
        dy,
        partial,
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
        items,
        parts,
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
    total = gradient_sum(weight)
    gradient = total
    if gradient is None:
        gradient = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    covered = weight.shape[0] if total is None else channels
    add_partial_sums_kernel[(ceil_divide(covered * kernel * kernel, _SUM_COLUMNS),)](
        partial,
        gradient,
        parts * folds,
        channels,
        covered,
        ADDED=total is not None,
        TAPS=kernel * kernel,
        ROWS=_SUM_ROWS,
        COLUMNS=_SUM_COLUMNS,
        num_warps=4,
    )
    return gradient if total is None else None
