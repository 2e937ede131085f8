"""Decode image files, in the same way for all tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from anywidth.errors import AnywidthError, packages_for

with packages_for("reading image files", "'anywidth[cli]'"):
    from PIL import ExifTags, Image, ImageOps
try:
    import simplejpeg
except ImportError:
    simplejpeg = None

Levels = npt.NDArray[np.uint8]
"""Pixels: height x width x channels."""

DEEP = 65535
"""The largest value of 16-bit grey."""
_TURNED = 5
"""From this EXIF orientation on, width and height are exchanged."""
_LONGEST = 8
"""Of a longer strip, only so many times its shorter side are resized."""
_FINENESS = 2
"""A JPEG file is decoded to at least so many times the pixels per side that are needed."""


def read_image(path: Path, mode: str | None = None, background: str | None = None) -> Image.Image:
    """Decode an image file, rotated by its EXIF data; the error names the file and the reason.

    `mode` is "RGB" or "L", with 8 bits per channel, or by default the file's own. `background` is
    the colour that shows through transparent parts; if not given, transparency is ignored.
    """
    with _errors_that_name(path):
        return decode(path, mode, background)


def read_size(path: Path) -> tuple[int, int]:
    """Height and width of what `read_image` returns."""
    with _errors_that_name(path), _opened(path) as image:
        return _upright_size(image)[::-1]


def decode(path: Path, mode: str | None = None, background: str | None = None) -> Image.Image:
    """As `read_image`, but with the decoder's own errors."""
    with _opened(path) as opened:
        image = _upright(opened)
    return _converted(image, mode, background)


def decode_crop(path: Path, choose: Callable[[int, int], tuple[int, ...]], least: int) -> Levels:
    """A part of an image, height x width x RGB, not necessarily in its full resolution.

    A JPEG file is decoded at a half, a quarter or an eighth of its resolution, which takes less
    time, if the part still has well more than `least` pixels per side, to which it is resized. Its
    edges are then rounded down to the pixels that there are. `choose` gets the width and height of
    the whole image, and returns left, top, right and bottom.
    """
    with _opened(path) as opened:
        box = choose(*_upright_size(opened))
        coarseness = _coarsen(opened, min(box[2] - box[0], box[3] - box[1]) // (_FINENESS * least))
        left, top, right, bottom = (edge // coarseness for edge in box)
        levels = _usual_jpeg(path, opened)
        if levels is not None:
            return levels[top:bottom, left:right]
        image = _upright(opened)
    crop = _converted(image, "RGB", None).crop((left, top, right, bottom))
    return np.array(crop)  # a copy, which may be written to


def _usual_jpeg(path: Path, opened: Image.Image) -> Levels | None:
    """The same pixels as Pillow's, in less time, if the optional decoder is there and can do it."""
    is_usual = opened.format == "JPEG" and opened.mode == "RGB" and _orientation(opened) == 1
    if simplejpeg is None or not is_usual:
        return None
    width, height = opened.size  # at the chosen resolution
    try:
        levels: Levels = simplejpeg.decode_jpeg(
            path.read_bytes(), min_height=height, min_width=width
        )
    except ValueError:
        return None  # what is damaged, and how much of it can be used, is for Pillow to say
    return levels if levels.shape == (height, width, 3) else None


def size_of_plain_jpeg(file: BinaryIO) -> tuple[int, int] | None:
    """Width and height, if the header is that of an upright JPEG file with 8-bit YCbCr or grey."""
    try:
        with Image.open(file, formats=["JPEG"]) as opened:
            info, layers = opened.info, [layer[0] for layer in getattr(opened, "layer", ())]
            is_plain = layers == [1, 2, 3] and info.get("adobe_transform", 1) == 1
            is_plain = is_plain or opened.mode == "L"
            if opened.format == "JPEG" and is_plain and _orientation(opened) == 1:
                return opened.size
    except Exception:  # Pillow raises many kinds of errors, which decoding the file will repeat
        pass
    return None


def _coarsen(opened: Image.Image, most: int) -> int:
    """Have a JPEG file decoded at 1/2, 1/4 or 1/8, but not below 1/most; return what it became."""
    fitting = next((factor for factor in (8, 4, 2) if factor <= most), 1)
    width, height = opened.size
    # Formats that cannot do it answer None.
    if fitting > 1 and opened.draft(None, (width // fitting, height // fitting)):
        return fitting
    return 1


def _upright_size(opened: Image.Image) -> tuple[int, int]:
    """Width and height."""
    width, height = opened.size
    return (height, width) if _orientation(opened) >= _TURNED else (width, height)


def _upright(opened: Image.Image) -> Image.Image:
    image = opened if _orientation(opened) == 1 else ImageOps.exif_transpose(opened)
    image.load()
    return image


def _converted(image: Image.Image, mode: str | None, background: str | None) -> Image.Image:
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.int64)
        if levels.min() < 0 or levels.max() > DEEP:
            raise AnywidthError(
                f"values from {levels.min()} to {levels.max()}, expected 0 to {DEEP}; save it "
                "with 8 or 16 bits"
            )
        if mode is not None:  # Pillow would clip rather than scale
            image = Image.fromarray(((levels * 255 + DEEP // 2) // DEEP).astype(np.uint8))
    if mode is None:
        return image
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        if background is not None:
            image = Image.alpha_composite(Image.new("RGBA", image.size, background), image)
    return image if image.mode == mode else image.convert(mode)


def central_square(image: Image.Image, size: int, resize: int) -> Image.Image:
    """What a network sees of a photo: its middle, after the shorter side became `resize` pixels."""
    width, height = image.size
    shorter = min(width, height)
    if max(width, height) > _LONGEST * shorter:
        # The rest is cut off anyway, and resized it could fill any memory.
        image = _middle(image, min(width, _LONGEST * shorter), min(height, _LONGEST * shorter))
        width, height = image.size
    sides = (int(resize * width / shorter), int(resize * height / shorter))
    return _middle(image.resize(sides, Image.Resampling.BILINEAR), size, size)


def _middle(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    if path.exists() and not path.is_file():
        raise AnywidthError("it is a folder, a pipe or a device, not a file")
    with Image.open(path) as image:
        if image.mode == "F":
            raise AnywidthError(
                "floating-point pixels have no known range; save it with 8 or 16 bits"
            )
        yield image


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, if it comes before the pixels: searching further would decode a PNG."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


@contextlib.contextmanager
def _errors_that_name(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise AnywidthError(f"{path}: there is no such image file") from error
    except Exception as error:  # decoders raise many kinds of errors
        raise AnywidthError(f"{path} cannot be read as an image: {error}") from error
