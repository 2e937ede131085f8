"""Gradients of filters from partial sums: the second stage of a sum over pixels.

There are no atomics, so that gradients are reproducible bit for bit: programs write sums over their
share of the pixels, and the kernel here adds them up.
"""

# mypy: allow-untyped-defs

import torch
import triton.language as tl
from torch import Tensor

from anywidth.training.gpu.kernels.compilation import compile_once
from anywidth.training.gpu.kernels.launch_blocks import ceil_divide
from anywidth.training.gpu.kernels.shared_buffers import gradient_sum

_ROWS = 128
_COLUMNS = 8


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

    All ``all_channels`` are written. With ``ADDED`` the sums are added to the existing values.
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


def gradient_of(weight: Tensor) -> tuple[Tensor, bool]:
    """The tensor for the gradient of a weight, and whether to add to it."""
    total = gradient_sum(weight)
    if total is not None:
        return total, True
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device), False


def add_partial_sums(partial: Tensor, gradient: Tensor, is_sum: bool) -> Tensor | None:
    """Add up sums laid out as (anything..., taps, channels); return the gradient if it is new.

    The taps are in the memory order of the gradient. A new gradient is zero for channels beyond
    those of the partial sums.
    """
    taps, channels = partial.shape[-2:]
    covered = channels if is_sum else gradient.shape[0]
    add_partial_sums_kernel[(ceil_divide(covered * taps, _COLUMNS),)](
        partial,
        gradient,
        partial.numel() // (taps * channels),
        channels,
        covered,
        ADDED=is_sum,
        TAPS=taps,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return None if is_sum else gradient
