"""Image files in, image files out: what a network's input and output make of pictures."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from anywidth_runtime.errors import RequestError
from anywidth_runtime.network import Network

_RANKS = 4


class PictureTooLarge(RequestError):
    """An image of more pixels than the server takes."""


@dataclass(frozen=True)
class PictureInput:
    """How an image file becomes an input of (N, C, H, W).

    Args:
        name: of the input.
        dtype: of the input; values are in [0, 1].
        channels: 1 takes grey values, 3 red, green and blue.
        size: (height, width) that images are brought to; None takes any size.
        shorter: for a fixed size: bring the shorter side to this, then cut out the middle, as
            validation does with photographs; None squeezes the whole image into the size.
    """

    name: str
    dtype: str
    channels: int
    size: tuple[int, int] | None
    shorter: int | None = None

    @staticmethod
    def of(network: Network) -> PictureInput | None:
        """What a network's only input takes; None if it takes no pictures."""
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
        """(1, C, H, W) of one image file, turned as its EXIF data says."""
        from PIL import Image, ImageOps

        try:
            with Image.open(io.BytesIO(file)) as opened:
                if opened.width * opened.height > most_pixels:
                    raise PictureTooLarge(
                        f"an image of {opened.width} x {opened.height} pixels: the server takes "
                        f"{most_pixels / 1e6:g} megapixels"
                    )
                picture = ImageOps.exif_transpose(opened)
                if picture.mode.startswith("I"):
                    # 16-bit grey, which conversion would clip rather than scale.
                    picture = Image.fromarray((np.asarray(picture) // 257).astype(np.uint8))
                picture = picture.convert("L" if self.channels == 1 else "RGB")
        except RequestError:
            raise
        except Exception as error:  # decoders of broken files raise whatever they trip over
            raise RequestError(f"not an image that can be read: {error}") from error
        if self.size is not None:
            picture = self._fitted(picture)
        pixels = np.asarray(picture, np.float32).reshape(picture.height, picture.width, -1) / 255
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]).astype(self.dtype)

    def _fitted(self, picture: Any) -> Any:
        from PIL import Image

        assert self.size is not None
        height, width = self.size
        if self.shorter is None:
            return picture.resize((width, height), Image.Resampling.BILINEAR)
        scale = self.shorter / min(picture.size)
        sides = (round(picture.width * scale), round(picture.height * scale))
        larger = picture.resize(sides, Image.Resampling.BILINEAR)
        left, top = (larger.width - width) // 2, (larger.height - height) // 2
        return larger.crop((left, top, left + width, top + height))


def makes_pictures(network: Network) -> bool:
    """Whether the first output is a picture, as large as one likes."""
    shape = network.outputs[0].shape
    return len(shape) == _RANKS and shape[1] in (1, 3)


def write_png(image: np.ndarray) -> bytes:
    """The PNG file of one (C, H, W) image in [0, 1]."""
    from PIL import Image

    levels = (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0)
    file = io.BytesIO()
    # The fastest compression: the time of the network is what the answer is about.
    Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels).save(
        file, "PNG", compress_level=1
    )
    return file.getvalue()
