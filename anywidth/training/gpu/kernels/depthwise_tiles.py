"""Shared by the depthwise kernels: tiles, and the pixels and channels of a lane.

A program works on a block of *positions* (an image and a few neighbouring columns of it) times a
block of *vectors* (a few neighbouring channels, one memory access). It walks down the rows of a
strip and keeps in registers what several rows need, so an input is read from memory about once.
Tensors in a program have the axes (positions, vectors, channels of a vector). Rows and columns that
are computed one by one are tuples of such tensors, so that a neighbour is an index away.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton knows no unpacking)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from anywidth.training.gpu.kernels.launch_blocks import (
    ceil_divide,
    choose_folds,
    choose_strips,
    multiprocessors,
)

_SHORTEST_STRIP = 8
_PROGRAMS_A_MULTIPROCESSOR = 4


@dataclass(frozen=True)
class Tile:
    """Block sizes of one kernel. They depend on the kernel size and stride, never on the width."""

    columns: int  # columns of one position per lane
    vector: int  # neighbouring channels per lane
    ahead: int  # steps that loads are ahead of the arithmetic
    positions: int = 16
    vectors: int = 8
    warps: int = 4

    def constants(self, channels: int) -> dict[str, int]:
        """The arguments of a kernel that never change with the width, besides the alignment."""
        return {
            "COLUMNS": self.columns,
            "VECTOR": self.vector,
            "AHEAD": self.ahead,
            "POSITIONS": self.positions,
            "VECTORS": self.vectors,
            "ALIGNED": channels % self.vector == 0,
            "num_warps": self.warps,
        }


@dataclass(frozen=True)
class Launch:
    """How the work of one kernel is divided: plain integers, free to change with the width."""

    vectors: int  # of channels
    folds: int  # pixels that share a row of a block
    tiles: int  # per row of an image
    blocks_of_vectors: int
    strips: int  # per image
    rows: int  # per strip
    items: int  # blocks of positions times strips
    wanted: int  # programs that keep the device busy

    @classmethod
    def of(
        cls, tile: Tile, images: int, channels: int, rows: int, columns: int, device: torch.device
    ) -> "Launch":
        """The launch for images of so many rows and columns, computed tile by tile."""
        vectors = ceil_divide(channels, tile.vector)
        folds = choose_folds(vectors, tile.vectors)
        tiles = ceil_divide(columns, tile.columns)
        blocks_of_vectors = ceil_divide(vectors * folds, tile.vectors)
        blocks_of_positions = ceil_divide(images * tiles, folds * tile.positions)
        wanted = _PROGRAMS_A_MULTIPROCESSOR * multiprocessors(device)
        programs = blocks_of_vectors * blocks_of_positions
        strips = choose_strips(programs, rows, _SHORTEST_STRIP, wanted)
        return cls(
            vectors,
            folds,
            tiles,
            blocks_of_vectors,
            strips,
            ceil_divide(rows, strips),
            blocks_of_positions * strips,
            wanted,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The arguments of a kernel, in its order."""
        channels = self.vectors, self.folds, self.tiles, self.blocks_of_vectors
        return *channels, self.strips, self.rows, self.items


@triton.jit
def stride_between_pixels(channels, vectors, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """The number of elements per pixel, written so that the compiler sees its divisor."""
    if ALIGNED:
        return vectors * VECTOR
    return channels


@triton.jit
def locate(
    block_of_positions,
    block_of_vectors,
    images,
    tiles,
    vectors,
    folds,
    POSITIONS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """The image, tile of columns and vector of channels of each lane, and whether it has work."""
    vector = block_of_vectors * VECTORS + tl.arange(0, VECTORS)
    block = block_of_positions * POSITIONS + tl.arange(0, POSITIONS)
    position = block[:, None] * folds + (vector // vectors)[None, :]
    image = position // tiles
    works = (vector < folds * vectors)[None, :] & (image < images)
    return image, position % tiles, vector % vectors, works


@triton.jit
def repeat(value, TIMES: tl.constexpr):
    """A tuple with ``value`` repeated ``TIMES`` times."""
    values = ()
    for _ in tl.static_range(TIMES):
        values = values + (value,)
    return values


@triton.jit
def columns_inside(
    first, width, works, channel_inside, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr
):
    """One mask per column, for ``COLUMNS`` columns from ``first`` on."""
    masks = ()
    for j in tl.static_range(COLUMNS):
        column = first + j
        inside = (works & (column >= 0) & (column < width))[:, :, None]
        if not ALIGNED:
            inside = inside & channel_inside[None, :, :]
        masks = masks + (inside,)
    return masks


@triton.jit
def load_rows(
    pointer,
    offset,
    row,
    height,
    line,
    pixel,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``ROWS`` rows from ``row`` on with ``COLUMNS`` columns each; padding is zero."""
    rows = ()
    for r in tl.static_range(ROWS):
        inside = (row + r >= 0) & (row + r < height)
        values = ()
        for j in tl.static_range(COLUMNS):
            place = pointer + (offset + (r * line + j * pixel))
            values = values + (tl.load(place, mask=columns[j] & inside, other=0.0),)
        rows = rows + (values,)
    return rows


@triton.jit
def load_taps(
    pointer,
    channel,
    channels,
    channel_stride,
    row_stride,
    column_stride,
    KERNEL: tl.constexpr,
):
    """The filter of every channel, one tensor per tap, read from the sliced parameter."""
    taps = ()
    for i in tl.static_range(KERNEL * KERNEL):
        offset = channel * channel_stride + (i // KERNEL) * row_stride + i % KERNEL * column_stride
        tap = tl.load(pointer + offset, mask=channel < channels, other=0.0)
        taps = taps + (tap.to(tl.float32)[None, :, :],)
    return taps


@triton.jit
def load_terms(pointer, channel, channels):
    """Mean, scale and shift of every channel, from the terms of a batch norm."""
    inside = channel < channels
    mean = tl.load(pointer + channel, mask=inside, other=0.0)[None, :, :]
    scale = tl.load(pointer + 3 * channels + channel, mask=inside, other=0.0)[None, :, :]
    shift = tl.load(pointer + 4 * channels + channel, mask=inside, other=0.0)[None, :, :]
    return mean, scale, shift
