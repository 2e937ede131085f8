"""Crop pictures of different sizes and resize the crops to one batch, in one launch.

The result is that of `interpolate(..., mode="bilinear", antialias=True)` on the crop as bytes: a
triangle filter, as wide as the crop is reduced, first along each row, rounded to whole levels, then
along each column.
"""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from anywidth.training.gpu.kernels.compilation import compile_once
from anywidth.training.gpu.kernels.launch_blocks import ceil_divide

PICTURE_FIELDS = 8
"""Numbers per picture: its address, its image in the batch, width, height; and its crop: left, top,
width and height."""
_ROWS = 8
_COLUMNS = 32


@triton.jit
def filter_of(position, whole, size):
    """Of output pixels: the middle, the first pixel and the end of what each is made of.

    Also the slope of the filter, and the largest number of pixels that it covers.
    """
    scale = whole.to(tl.float32) / size
    reach = tl.maximum(scale, 1.0)
    middle = (position + 0.5) * scale
    first = tl.maximum((middle - reach + 0.5).to(tl.int32), 0)
    end = tl.minimum((middle + reach + 0.5).to(tl.int32), whole)
    return middle, first, end, 1.0 / reach, (2 * reach).to(tl.int32) + 1


@triton.jit
def weight_of(pixel, middle, end, slope):
    """The height of the triangle at the middle of a pixel; nothing beyond the crop."""
    height = 1.0 - tl.abs(pixel + 0.5 - middle) * slope
    return tl.where(pixel < end, tl.maximum(height, 0.0), 0.0)


@triton.jit
def rounded(level):
    """The nearest whole level, as a float."""
    return tl.floor(level + 0.5)


@compile_once
def crop_resize_kernel(
    pictures_ptr: tl.tensor,
    images_ptr: tl.tensor,
    size: int,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One tile of one image, all three channels."""
    picture_ptr = pictures_ptr + tl.program_id(1) * FIELDS
    levels_ptr = tl.load(picture_ptr).to(tl.pointer_type(tl.uint8))
    image_ptr = images_ptr + tl.load(picture_ptr + 1) * size * size * 3
    width = tl.load(picture_ptr + 2).to(tl.int32)
    plane = width * tl.load(picture_ptr + 3).to(tl.int32)
    left = tl.load(picture_ptr + 4).to(tl.int32)
    top = tl.load(picture_ptr + 5).to(tl.int32)
    crop_width = tl.load(picture_ptr + 6).to(tl.int32)
    crop_height = tl.load(picture_ptr + 7).to(tl.int32)

    across = tl.cdiv(size, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    # A tile that reaches beyond the image repeats its last pixels and does not store them.
    column_inside, row_inside = tl.minimum(column, size - 1), tl.minimum(row, size - 1)
    middle_x, first_x, end_x, slope_x, count_x = filter_of(column_inside, crop_width, size)
    middle_y, first_y, end_y, slope_y, count_y = filter_of(row_inside, crop_height, size)
    total_x = tl.zeros((COLUMNS,), tl.float32)
    for step in range(count_x):
        total_x += weight_of(first_x + step, middle_x, end_x, slope_x)
    total_y = tl.zeros((ROWS,), tl.float32)
    for step in range(count_y):
        total_y += weight_of(first_y + step, middle_y, end_y, slope_y)
    unit_x, unit_y = 1.0 / total_x, 1.0 / total_y

    red = tl.zeros((ROWS, COLUMNS), tl.float32)
    green = tl.zeros((ROWS, COLUMNS), tl.float32)
    blue = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step_y in range(count_y):
        y = first_y + step_y
        share_y = (weight_of(y, middle_y, end_y, slope_y) * unit_y)[:, None]
        row_ptr = levels_ptr + ((top + y) * width + left)[:, None]
        red_of_row = tl.zeros((ROWS, COLUMNS), tl.float32)
        green_of_row = tl.zeros((ROWS, COLUMNS), tl.float32)
        blue_of_row = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step_x in range(count_x):
            x = first_x + step_x
            share_x = (weight_of(x, middle_x, end_x, slope_x) * unit_x)[None, :]
            place = row_ptr + x[None, :]
            inside = (y < end_y)[:, None] & (x < end_x)[None, :]
            red_of_row += share_x * tl.load(place, mask=inside, other=0).to(tl.float32)
            green_of_row += share_x * tl.load(place + plane, mask=inside, other=0).to(tl.float32)
            blue_of_row += share_x * tl.load(place + 2 * plane, mask=inside, other=0).to(tl.float32)
        red += share_y * rounded(red_of_row)
        green += share_y * rounded(green_of_row)
        blue += share_y * rounded(blue_of_row)

    place = image_ptr + (row[:, None] * size + column[None, :]) * 3
    inside = (row < size)[:, None] & (column < size)[None, :]
    tl.store(place, rounded(red).to(tl.uint8), mask=inside)
    tl.store(place + 1, rounded(green).to(tl.uint8), mask=inside)
    tl.store(place + 2, rounded(blue).to(tl.uint8), mask=inside)


def crop_and_resize(pictures: Tensor, images: Tensor) -> None:
    """Write crops of pictures into a batch.

    Args:
        pictures: int64, one row of ``PICTURE_FIELDS`` numbers per picture. An address is that of
            contiguous bytes, 3 x height x width, which must stay there until the kernel has run.
        images: uint8, samples x size x size x 3.
    """
    size = images.shape[1]
    tiles = ceil_divide(size, _ROWS) * ceil_divide(size, _COLUMNS)
    if len(pictures):
        with torch.cuda.device_of(images):
            crop_resize_kernel[(tiles, len(pictures))](
                pictures,
                images,
                size,
                FIELDS=PICTURE_FIELDS,
                ROWS=_ROWS,
                COLUMNS=_COLUMNS,
                num_warps=4,
            )
