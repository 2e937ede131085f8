"""Image files as inputs and outputs of a network."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from anywidth_runtime.errors import RequestError
from anywidth_runtime.network import Network

_RANKS = 4
_DEEP = 65535
# Of a longer strip, only so many times its shorter side are resized.
_LONGEST = 8


class PictureTooLarge(RequestError):
    """An image has more pixels than the server accepts."""


@dataclass(frozen=True)
class PictureInput:
    """How an image file becomes an input of (N, C, H, W).

    Args:
        name: name of the input.
        dtype: type of the input; values are in [0, 1].
        channels: 1 for grey values, 3 for red, green and blue.
        size: (height, width) to which images are resized; None accepts any size.
        shorter: for a fixed size: resize the shorter side to this and cut out the centre, as in
            validation; None resizes the whole image to the size, whatever its shape.
    """

    name: str
    dtype: str
    channels: int
    size: tuple[int, int] | None
    shorter: int | None = None

    @staticmethod
    def of(network: Network) -> PictureInput | None:
        """How the only input of a network takes pictures; None if it takes none."""
        if len(network.inputs) != 1 or network.task == "reinforcement":
            return None
        (one,) = network.inputs
        if len(one.shape) != _RANKS or not one.dtype.startswith("float"):
            return None
        _, channels, height, width = one.shape
        if channels not in (1, 3):
            return None
        fixed = isinstance(height, int) and isinstance(width, int)
        shorter = json.loads(network.facts.get("shorter_side", "null"))
        size = (height, width) if fixed else None
        return PictureInput(one.name, one.dtype, int(channels), size, shorter)  # type: ignore[arg-type]

    def read(self, file: bytes, most_pixels: int) -> np.ndarray:
        """(1, C, H, W) of one image file, rotated by its EXIF data."""
        try:
            with Image.open(io.BytesIO(file)) as opened:
                if opened.width * opened.height > most_pixels:
                    raise PictureTooLarge(
                        f"an image of {opened.width} x {opened.height} pixels: the server takes "
                        f"{most_pixels / 1e6:g} megapixels"
                    )
                picture = _upright(opened)
                if picture.mode == "F":
                    raise RequestError("floating-point pixels have no known range; send 8 bits")
                if picture.mode.startswith("I"):
                    picture = _in_8_bits(picture)
                if "transparency" in picture.info:
                    picture = picture.convert("RGBA")
                picture = picture.convert("L" if self.channels == 1 else "RGB")
        except RequestError:
            raise
        except Exception as error:  # decoders raise many kinds of errors
            raise RequestError(f"not an image that can be read: {error}") from error
        if self.size is not None:
            picture = self._fitted(picture, *self.size)
        pixels = np.asarray(picture, np.float32).reshape(picture.height, picture.width, -1) / 255
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]).astype(self.dtype)

    def _fitted(self, picture: Image.Image, height: int, width: int) -> Image.Image:
        if self.shorter is None:
            return picture.resize((width, height), Image.Resampling.BILINEAR)
        least = min(picture.size)
        if max(picture.size) > _LONGEST * least:  # resized whole, it could fill any memory
            picture = _middle(picture, *(min(side, _LONGEST * least) for side in picture.size))
        wide, high = (int(self.shorter * side / least) for side in picture.size)
        return _middle(picture.resize((wide, high), Image.Resampling.BILINEAR), width, height)


def _middle(picture: Image.Image, width: int, height: int) -> Image.Image:
    left, top = round((picture.width - width) / 2), round((picture.height - height) / 2)
    return picture.crop((left, top, left + width, top + height))


def _upright(picture: Image.Image) -> Image.Image:
    """Rotated by EXIF data, if a PNG has it before its pixels."""
    if picture.format == "PNG" and "exif" not in picture.info:
        return picture
    return ImageOps.exif_transpose(picture)


def _in_8_bits(picture: Image.Image) -> Image.Image:
    """16-bit grey, which Pillow would clip rather than scale."""
    levels = np.asarray(picture).astype(np.int64)
    if levels.min() < 0 or levels.max() > _DEEP:
        raise RequestError(f"grey values up to {levels.max()}: expected 8 or 16 bits")
    return Image.fromarray(((levels * 255 + _DEEP // 2) // _DEEP).astype(np.uint8))


def makes_pictures(network: Network) -> bool:
    """Whether the first output is a picture of any size."""
    shape = network.outputs[0].shape
    return len(shape) == _RANKS and shape[1] in (1, 3)


def write_png(image: np.ndarray) -> bytes:
    """The PNG file of one (C, H, W) image in [0, 1]."""
    levels = (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0)
    file = io.BytesIO()
    # The fastest compression, because the time of the answer matters more than its size.
    Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels).save(
        file, "PNG", compress_level=1
    )
    return file.getvalue()
