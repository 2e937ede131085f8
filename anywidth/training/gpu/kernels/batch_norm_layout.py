"""How the batch norm kernels divide a channels-last tensor.

The tensor is a matrix of pixels times channels. ``folds`` neighbouring pixels form one row, so that
few channels still fill a block; the channel of an element is its column modulo the channel count.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from anywidth.training.gpu.kernels.launch_blocks import (
    ceil_divide,
    choose_folds,
    choose_parts,
    multiprocessors,
)

# Channels per memory access of 16 bytes in half precision.
VECTOR = 8
BLOCK_COLUMNS = 64
PARTIAL_COLUMNS = 8
# Of the kernels that add partial sums.
PARTIAL_BLOCKS = {"ROWS": 128, "COLUMNS": PARTIAL_COLUMNS, "num_warps": 4}


@dataclass(frozen=True)
class Layout:
    """A tensor divided into blocks of rows and columns, in plain integers."""

    pixels: int
    channels: int
    folds: int
    rows: int
    blocks: int
    aligned: bool
    multiprocessors: int

    @classmethod
    def of(cls, x: Tensor) -> "Layout":
        images, channels, height, width = x.shape
        pixels = images * height * width
        folds = choose_folds(channels, BLOCK_COLUMNS)
        return cls(
            pixels=pixels,
            channels=channels,
            folds=folds,
            rows=ceil_divide(pixels, folds),
            blocks=ceil_divide(channels * folds, BLOCK_COLUMNS),
            aligned=channels % VECTOR == 0,
            multiprocessors=multiprocessors(x.device),
        )

    def parts(self, block_rows: int, programs_a_multiprocessor: int) -> int:
        """Programs that share the rows of one block of columns."""
        steps = ceil_divide(self.rows, block_rows)
        return choose_parts(self.blocks, steps, programs_a_multiprocessor * self.multiprocessors)

    def sizes(self, parts: int) -> tuple[int, ...]:
        """The arguments of a kernel that may change with the width."""
        return self.pixels, self.channels, self.folds, self.rows, self.blocks, parts

    def constants(self, block_rows: int) -> dict[str, int]:
        return {
            "ROWS": block_rows,
            "COLUMNS": BLOCK_COLUMNS,
            "ALIGNED": self.aligned,
            "num_warps": 4,
        }


@triton.jit
def columns_of_block(block, channels, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """The columns of a block, their channels, and the number of elements per pixel.

    With ``ALIGNED`` a vector of neighbouring columns is a vector of neighbouring channels, and
    starts at a multiple of its size; the compiler cannot know this and is told.
    """
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    channel = column % channels
    pixel = channels
    if ALIGNED:
        channel = tl.max_contiguous(tl.multiple_of(channel, 8), 8)
        pixel = (channels // 8) * 8
    return column, channel, pixel


@triton.jit
def add_partial_rows(
    partial_ptr, channel, rows, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add the rows of a matrix of partial sums, in one fixed order."""
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (channel < channels)[None, :]
        offset = row[:, None] * channels + channel[None, :]
        sums += tl.load(partial_ptr + offset, mask=inside, other=0.0)
    return tl.sum(sums, axis=0)
