"""A 3x3 convolution of an image (few input channels), channels last: output, weight gradient.

Every output pixel sees ``9 * IN_CHANNELS`` numbers, its *patch*. Patches are gathered from the
input, which is small and stays in the cache, and multiplied with the filters as matrices; they are
never written. While writing, the kernel can compute the statistics for the batch norm after it.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from anywidth.training.gpu.kernels.compilation import compile_once
from anywidth.training.gpu.kernels.launch_blocks import ceil_divide, choose_parts, multiprocessors
from anywidth.training.gpu.kernels.partial_sums import add_partial_sums, gradient_of

KERNEL = 3
_PIXELS = 128
_CHANNELS = 32
_VECTOR = tl.constexpr(8)  # neighbouring channels, one memory access
_PROGRAMS_A_MULTIPROCESSOR = 4


@triton.jit
def load_patches(
    x_ptr,
    pixel,
    pixels,
    height,
    width,
    out_height,
    out_width,
    tap,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    IN_CHANNELS: tl.constexpr,
):
    """The patches of some output pixels, one row each; zero outside the image and the taps."""
    image = pixel // (out_height * out_width)
    place = pixel % (out_height * out_width)
    row = (place // out_width * STRIDE - PADDING)[:, None] + (tap // (3 * IN_CHANNELS))[None, :]
    column = (place % out_width * STRIDE - PADDING)[:, None] + (tap // IN_CHANNELS % 3)[None, :]
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    inside &= (pixel < pixels)[:, None] & (tap < 9 * IN_CHANNELS)[None, :]
    offset = ((image * height)[:, None] + row) * width + column
    return tl.load(
        x_ptr + (offset * IN_CHANNELS + (tap % IN_CHANNELS)[None, :]), mask=inside, other=0.0
    )


@triton.jit
def place_channels(block, channels, vectors, CHANNELS: tl.constexpr, ALIGNED: tl.constexpr):
    """The channels of a block, their mask, and the number of elements per pixel.

    With ``ALIGNED`` the code is written so that the compiler sees whole vectors.
    """
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    if ALIGNED:
        return channel, channel // _VECTOR < vectors, vectors * _VECTOR
    return channel, channel < channels, channels


@compile_once
def stem_forward_kernel(
    x_ptr: tl.tensor,
    weight_slice_ptr: tl.tensor,
    y_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    pixels: int,
    height: int,
    width: int,
    out_height: int,
    out_width: int,
    channels: int,
    vectors: int,
    blocks: int,
    items: int,
    parts: int,
    weight_channel: int,
    weight_input: int,
    weight_row: int,
    weight_column: int,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    IN_CHANNELS: tl.constexpr,
    STATISTICS: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Loop over blocks of pixels; statistics are laid out as (3, parts, channels)."""
    program = tl.program_id(0)
    part = program // blocks
    channel, exists, stride = place_channels(program % blocks, channels, vectors, CHANNELS, ALIGNED)
    tap = tl.arange(0, TAPS)
    filters = tl.load(
        weight_slice_ptr
        + (
            (tap % IN_CHANNELS * weight_input)
            + (tap // (3 * IN_CHANNELS) * weight_row)
            + (tap // IN_CHANNELS % 3 * weight_column)
        )[:, None]
        + (channel * weight_channel)[None, :],
        mask=(tap < 9 * IN_CHANNELS)[:, None] & exists[None, :],
        other=0.0,
    ).to(x_ptr.dtype.element_ty)
    if STATISTICS:
        count = 0
        origin = tl.zeros((CHANNELS,), tl.float32)
        distances = tl.zeros((PIXELS, CHANNELS), tl.float32)
        squares = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for item in range(part, items, parts):
        lane = tl.arange(0, PIXELS)
        pixel = item * PIXELS + lane
        patches = load_patches(
            x_ptr,
            pixel,
            pixels,
            height,
            width,
            out_height,
            out_width,
            tap,
            STRIDE,
            PADDING,
            IN_CHANNELS,
        )
        value = tl.dot(patches, filters, input_precision="ieee").to(y_ptr.dtype.element_ty)
        mask = (pixel < pixels)[:, None] & exists[None, :]
        tl.store(y_ptr + (pixel * stride)[:, None] + channel[None, :], value, mask=mask)
        if STATISTICS:
            value = value.to(tl.float32)
            if item == part:
                origin = tl.sum(tl.where((lane == 0)[:, None], value, 0.0), axis=0)
            distance = tl.where((pixel < pixels)[:, None], value - origin[None, :], 0.0)
            distances += distance
            squares += distance * distance
            count += tl.minimum(PIXELS, pixels - item * PIXELS)
    if STATISTICS:
        # Distances to a value of the channel itself keep the variance exact when the mean is large.
        total = tl.sum(distances, axis=0)
        mean = total / count
        place = partial_ptr + part * stride + channel
        plane = parts * stride
        tl.store(place, count + tl.zeros_like(mean), mask=exists)
        tl.store(place + plane, origin + mean, mask=exists)
        tl.store(place + 2 * plane, tl.sum(squares, axis=0) - total * mean, mask=exists)


@compile_once
def stem_weight_gradient_kernel(
    x_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    pixels: int,
    height: int,
    width: int,
    out_height: int,
    out_width: int,
    channels: int,
    vectors: int,
    blocks: int,
    items: int,
    parts: int,
    gradient_input: int,
    gradient_row: int,
    gradient_column: int,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    IN_CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Partial sums over a share of the pixels, laid out as (parts, taps in memory order, channels).

    The taps are in the memory order of the gradient, given by ``gradient_input`` and so on.
    """
    program = tl.program_id(0)
    part = program // blocks
    channel, exists, stride = place_channels(program % blocks, channels, vectors, CHANNELS, ALIGNED)
    tap = tl.arange(0, TAPS)
    sums = tl.zeros((TAPS, CHANNELS), tl.float32)
    for item in range(part, items, parts):
        pixel = item * PIXELS + tl.arange(0, PIXELS)
        patches = load_patches(
            x_ptr,
            pixel,
            pixels,
            height,
            width,
            out_height,
            out_width,
            tap,
            STRIDE,
            PADDING,
            IN_CHANNELS,
        )
        dy = tl.load(
            dy_ptr + (pixel * stride)[:, None] + channel[None, :],
            mask=(pixel < pixels)[:, None] & exists[None, :],
            other=0.0,
        )
        sums += tl.dot(tl.trans(patches), dy, input_precision="ieee")
    place = (
        tap % IN_CHANNELS * gradient_input
        + tap // (3 * IN_CHANNELS) * gradient_row
        + tap // IN_CHANNELS % 3 * gradient_column
    )
    offset = ((part * 9 * IN_CHANNELS + place) * stride)[:, None] + channel[None, :]
    mask = (tap < 9 * IN_CHANNELS)[:, None] & exists[None, :]
    tl.store(partial_ptr + offset, sums, mask=mask)


def stem_forward(
    x: Tensor, weight: Tensor, channels: int, stride: int, padding: int, statistics: bool
) -> tuple[Tensor, Tensor | None]:
    """Convolve ``x`` with the first ``channels`` filters of ``weight``, cast to its type.

    With ``statistics``, also returns the partial statistics that :func:`merged_terms` takes.
    """
    shape = (x.shape[0], channels, *output_size(x, stride, padding))
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    launch = _Launch.of(x, y, stride, padding)
    partial = None
    if statistics:
        partial = torch.empty((3, launch.parts, channels), dtype=torch.float32, device=x.device)
    stem_forward_kernel[(launch.programs,)](
        x,
        weight,
        y,
        y if partial is None else partial,
        *launch.sizes,
        *weight.stride(),
        STATISTICS=statistics,
        **launch.constants,
    )
    return y, partial


def stem_weight_gradient(
    x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int
) -> Tensor | None:
    """The gradient of ``weight``, zero for unused filters; None if it was added to a sum.

    See :mod:`anywidth.training.gpu.kernels.shared_buffers`.
    """
    launch = _Launch.of(x, dy, stride, padding)
    gradient, is_sum = gradient_of(weight)
    taps, channels = KERNEL * KERNEL * x.shape[1], dy.shape[1]
    partial = torch.empty((launch.parts, taps, channels), dtype=torch.float32, device=x.device)
    stem_weight_gradient_kernel[(launch.programs,)](
        x,
        dy,
        partial,
        *launch.sizes,
        *gradient.stride()[1:],
        **launch.constants,
    )
    return add_partial_sums(partial, gradient, is_sum)


def output_size(x: Tensor, stride: int, padding: int) -> tuple[int, int]:
    """Rows and columns of the output."""
    height, width = ((size + 2 * padding - KERNEL) // stride + 1 for size in x.shape[2:])
    return height, width


@dataclass(frozen=True)
class _Launch:
    """How the work of a kernel is divided, as arguments of both kernels."""

    programs: int
    parts: int  # programs that share the pixels of a block of channels
    sizes: tuple[int, ...]  # arguments that may change with the width
    constants: dict[str, int]

    @classmethod
    def of(cls, x: Tensor, y: Tensor, stride: int, padding: int) -> "_Launch":
        """For a convolution of ``x`` whose output has the shape of ``y``."""
        in_channels, height, width = x.shape[1:]
        images, channels, out_height, out_width = y.shape
        pixels = images * out_height * out_width
        blocks, items = ceil_divide(channels, _CHANNELS), ceil_divide(pixels, _PIXELS)
        wanted = _PROGRAMS_A_MULTIPROCESSOR * multiprocessors(x.device)
        parts = choose_parts(blocks, items, wanted)
        vectors = ceil_divide(channels, _VECTOR.value)
        places = (pixels, height, width, out_height, out_width)
        return cls(
            programs=blocks * parts,
            parts=parts,
            sizes=(*places, channels, vectors, blocks, items, parts),
            constants={
                "STRIDE": stride,
                "PADDING": padding,
                "IN_CHANNELS": in_channels,
                "PIXELS": _PIXELS,
                "CHANNELS": _CHANNELS,
                "TAPS": max(16, triton.next_power_of_2(KERNEL * KERNEL * in_channels)),
                "ALIGNED": channels % _VECTOR.value == 0,
                "num_warps": 4,
            },
        )
