"""Pointwise convolution of few channels, channels last: a product bound by memory.

The tensor is a matrix of pixels times channels. A program keeps the weight of its output channels
and walks over blocks of pixels. While reading, the kernels can normalise the input by the terms of
a batch norm and activate it; while writing, the product can compute the statistics for the batch
norm after it. Each saves passes over memory.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from anywidth.training.gpu.kernels.activations import activate, through_activation
from anywidth.training.gpu.kernels.compilation import compile_once
from anywidth.training.gpu.kernels.launch_blocks import ceil_divide, choose_parts, multiprocessors

# Channels per memory access of 16 bytes in half precision.
VECTOR = 8
# The narrowest block of channels that a product of matrices takes.
_FEWEST = 16
_PIXELS = 128
_LARGEST_PART = 64
_PROGRAMS = 4


@triton.jit
def divisible(channels, ALIGNED: tl.constexpr):
    """The number of channels, written so that the compiler sees its divisor."""
    if ALIGNED:
        return (channels // 8) * 8
    return channels


@triton.jit
def load_normalizer(terms_ptr, channel, channels, NORMED: tl.constexpr):
    """Scale and shift per channel as a row each, so that a channel is ``x * scale + shift``."""
    scale = tl.zeros_like(channel).to(tl.float32)
    shift = scale
    if NORMED:
        inside = channel < channels
        mean = tl.load(terms_ptr + channel, mask=inside, other=0.0)
        scale = tl.load(terms_ptr + 3 * channels + channel, mask=inside, other=0.0)
        shift = tl.load(terms_ptr + 4 * channels + channel, mask=inside, other=0.0) - mean * scale
    return scale[None, :], shift[None, :]


@triton.jit
def load_pixels(
    x_ptr,
    row,
    channel,
    pixels,
    channels,
    scale,
    shift,
    NORMED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Some pixels and channels of the input, normalised and activated; zero outside."""
    offset = row[:, None] * channels + channel[None, :]
    inside = (row < pixels)[:, None] & (channel < channels)[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    if NORMED:
        z = activate(x.to(tl.float32) * scale + shift, ACTIVATION)
        x = tl.where(inside, z, 0.0).to(x.dtype)
    return x


@compile_once
def pointwise_forward_kernel(
    x_ptr: tl.tensor,
    weight_slice_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    y_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    pixels: int,
    read: int,
    made: int,
    weight_row: int,
    blocks: int,
    parts: int,
    NORMED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STATISTICS: tl.constexpr,
    PIXELS: tl.constexpr,
    READ: tl.constexpr,
    MADE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One block of output channels over every ``parts``-th block of pixels.

    Statistics are laid out as (3, parts, made): counts, means and squared deviations.
    """
    read, made = divisible(read, ALIGNED), divisible(made, ALIGNED)
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks
    channel = tl.arange(0, READ)
    column = block * MADE + tl.arange(0, MADE)
    scale, shift = load_normalizer(terms_ptr, channel, read, NORMED)
    weight = tl.load(
        weight_slice_ptr + column[None, :] * weight_row + channel[:, None],
        mask=(column < made)[None, :] & (channel < read)[:, None],
        other=0.0,
    ).to(x_ptr.dtype.element_ty)
    count = 0.0
    mean = tl.zeros((MADE,), tl.float32)
    deviations = tl.zeros((MADE,), tl.float32)
    for start in range(part * PIXELS, pixels, parts * PIXELS):
        row = start + tl.arange(0, PIXELS)
        x = load_pixels(x_ptr, row, channel, pixels, read, scale, shift, NORMED, ACTIVATION)
        y = tl.dot(x, weight, input_precision=PRECISION).to(y_ptr.dtype.element_ty)
        offset = row[:, None] * made + column[None, :]
        inside = (row < pixels)[:, None] & (column < made)[None, :]
        tl.store(y_ptr + offset, y, mask=inside)
        if STATISTICS:
            # Of the block by itself, then joined with those before it.
            value = y.to(tl.float32)
            more = tl.minimum(PIXELS, pixels - start) * 1.0
            average = tl.sum(tl.where(inside, value, 0.0), axis=0) / more
            distance = tl.where(inside, value - average[None, :], 0.0)
            apart = average - mean
            both = count + more
            deviations += tl.sum(distance * distance, axis=0)
            deviations += apart * apart * (count * (more / both))
            mean += apart * (more / both)
            count = both
    if STATISTICS:
        place = partial_ptr + part * made + column
        tl.store(place, tl.zeros((MADE,), tl.float32) + count, mask=column < made)
        tl.store(place + parts * made, mean, mask=column < made)
        tl.store(place + 2 * parts * made, deviations, mask=column < made)


@compile_once
def pointwise_weight_gradient_kernel(
    x_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    pixels: int,
    read: int,
    made: int,
    blocks_of_read: int,
    blocks: int,
    parts: int,
    NORMED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PIXELS: tl.constexpr,
    READ: tl.constexpr,
    MADE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The gradient of one block of the weight, summed over every ``parts``-th block of pixels.

    Sums are laid out as (parts, made, read).
    """
    read, made = divisible(read, ALIGNED), divisible(made, ALIGNED)
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks
    channel = (block % blocks_of_read) * READ + tl.arange(0, READ)
    column = (block // blocks_of_read) * MADE + tl.arange(0, MADE)
    scale, shift = load_normalizer(terms_ptr, channel, read, NORMED)
    sums = tl.zeros((MADE, READ), tl.float32)
    for start in range(part * PIXELS, pixels, parts * PIXELS):
        row = start + tl.arange(0, PIXELS)
        x = load_pixels(x_ptr, row, channel, pixels, read, scale, shift, NORMED, ACTIVATION)
        offset = row[:, None] * made + column[None, :]
        inside = (row < pixels)[:, None] & (column < made)[None, :]
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0)
        sums = tl.dot(tl.trans(dy), x, sums, input_precision=PRECISION)
    offset = (part * made + column)[:, None] * read + channel[None, :]
    inside = (column < made)[:, None] & (channel < read)[None, :]
    tl.store(partial_ptr + offset, sums, mask=inside)


@compile_once
def pointwise_input_gradient_kernel(
    dy_ptr: tl.tensor,
    weight_slice_ptr: tl.tensor,
    x_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    dz_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    pixels: int,
    read: int,
    made: int,
    weight_row: int,
    blocks: int,
    parts: int,
    ACTIVATION: tl.constexpr,
    PIXELS: tl.constexpr,
    READ: tl.constexpr,
    MADE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The gradient of the normalised input before its activation, ``dz``, for one block of input
    channels, and its sums and those of ``dz * (x - mean)``, laid out as (2, parts, read).
    """
    read, made = divisible(read, ALIGNED), divisible(made, ALIGNED)
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks
    channel = block * READ + tl.arange(0, READ)
    column = tl.arange(0, MADE)
    known = channel < read
    mean = tl.load(terms_ptr + channel, mask=known, other=0.0)[None, :]
    scale = tl.load(terms_ptr + 3 * read + channel, mask=known, other=0.0)[None, :]
    shift = tl.load(terms_ptr + 4 * read + channel, mask=known, other=0.0)[None, :]
    weight = tl.load(
        weight_slice_ptr + column[:, None] * weight_row + channel[None, :],
        mask=(column < made)[:, None] & known[None, :],
        other=0.0,
    ).to(dy_ptr.dtype.element_ty)
    sums = tl.zeros((READ,), tl.float32)
    products = tl.zeros((READ,), tl.float32)
    for start in range(part * PIXELS, pixels, parts * PIXELS):
        row = start + tl.arange(0, PIXELS)
        offset = row[:, None] * made + column[None, :]
        inside = (row < pixels)[:, None] & (column < made)[None, :]
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0)
        dx = tl.dot(dy, weight, input_precision=PRECISION).to(dz_ptr.dtype.element_ty)
        offset = row[:, None] * read + channel[None, :]
        inside = (row < pixels)[:, None] & known[None, :]
        centered = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32) - mean
        dz = through_activation(dx.to(tl.float32), centered * scale + shift, ACTIVATION)
        tl.store(dz_ptr + offset, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        dz = tl.where(inside, dz, 0.0)
        sums += tl.sum(dz, axis=0)
        products += tl.sum(dz * centered, axis=0)
    place = partial_ptr + part * read + channel
    tl.store(place, sums, mask=known)
    tl.store(place + parts * read, products, mask=known)


def pointwise_forward(
    x: Tensor,
    weight: Tensor,
    made: int,
    terms: Tensor | None = None,
    activation: str = "none",
    statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The product of ``x`` with the first ``made`` filters of ``weight``, cut to its channels.

    With the ``terms`` of a batch norm, ``x`` is normalised and activated first. With
    ``statistics``, also returns the partial statistics that
    :func:`~anywidth.training.gpu.kernels.batch_norm_forward.merged_terms` takes.
    """
    images, read, height, width = x.shape
    pixels = images * height * width
    y = torch.empty(
        (images, made, height, width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    all_read, block = _all(weight.shape[1]), _part(weight.shape[0])
    blocks = ceil_divide(made, block)
    parts = _parts(blocks, pixels, x)
    partial = None
    if statistics:
        partial = torch.empty((3, parts, made), dtype=torch.float32, device=x.device)
    pointwise_forward_kernel[(blocks * parts,)](
        *(x, weight, x if terms is None else terms, y, x if partial is None else partial),
        *(pixels, read, made, weight.stride(0), blocks, parts),
        NORMED=terms is not None,
        ACTIVATION=activation,
        STATISTICS=statistics,
        READ=all_read,
        MADE=block,
        **_constants(x, made, all_read),
    )
    return y, partial


def pointwise_weight_gradient(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    terms: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """The gradient of the active part of ``weight``, in float32."""
    read, made = x.shape[1], dy.shape[1]
    pixels = x.numel() // read
    block_of_made, block_of_read = (_part(channels) for channels in weight.shape[:2])
    blocks_of_read = ceil_divide(read, block_of_read)
    blocks = blocks_of_read * ceil_divide(made, block_of_made)
    parts = _parts(blocks, pixels, x)
    partial = torch.empty((parts, made, read), dtype=torch.float32, device=x.device)
    pointwise_weight_gradient_kernel[(blocks * parts,)](
        *(x, dy, x if terms is None else terms, partial),
        *(pixels, read, made, blocks_of_read, blocks, parts),
        NORMED=terms is not None,
        ACTIVATION=activation,
        READ=block_of_read,
        MADE=block_of_made,
        **_constants(x, made, _PIXELS),
    )
    return partial.sum(0)


def pointwise_input_gradient(
    x: Tensor, dy: Tensor, weight: Tensor, terms: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """The gradient of ``x`` normalised, before its activation, and the norm's partial sums.

    The sums are for
    :func:`~anywidth.training.gpu.kernels.batch_norm_backward.gradients_through_norm`.
    """
    read, made = x.shape[1], dy.shape[1]
    pixels = x.numel() // read
    dz = torch.empty_like(x, memory_format=torch.channels_last)
    all_made, block = _all(weight.shape[0]), _part(weight.shape[1])
    blocks = ceil_divide(read, block)
    parts = _parts(blocks, pixels, x)
    partial = torch.empty((2, parts, read), dtype=torch.float32, device=x.device)
    pointwise_input_gradient_kernel[(blocks * parts,)](
        *(dy, weight, x, terms, dz, partial),
        *(pixels, read, made, weight.stride(0), blocks, parts),
        ACTIVATION=activation,
        READ=block,
        MADE=all_made,
        **_constants(x, made, all_made),
    )
    return dz, partial


# Block sizes depend on a layer's weight, never on the width.


def _all(channels: int) -> int:
    """The block that holds all channels of a layer."""
    return max(_FEWEST, triton.next_power_of_2(channels))


def _part(channels: int) -> int:
    return min(_LARGEST_PART, _all(channels))


def _parts(blocks: int, pixels: int, x: Tensor) -> int:
    steps = ceil_divide(pixels, _PIXELS)
    return choose_parts(blocks, steps, _PROGRAMS * multiprocessors(x.device))


def _constants(x: Tensor, made: int, added: int) -> dict[str, int | str]:
    """``added`` is the number of products that an element of the result adds up."""
    return {
        "PIXELS": _PIXELS,
        "ALIGNED": x.shape[1] % VECTOR == 0 and made % VECTOR == 0,
        # In float32 without rounding, as PyTorch's convolutions unless told otherwise.
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        # As many blocks in advance as shared memory holds.
        "num_stages": 3 if added <= _PIXELS else 2,
    }
