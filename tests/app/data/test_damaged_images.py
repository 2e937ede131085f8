"""Image files of any content: an image, or an error that names the file."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from mutations import damaged, refusal
from PIL import ExifTags, Image

from anywidth.app.data.image_reading import read_image, read_size

TURNED = Image.Exif()
TURNED[ExifTags.Base.Orientation] = 6
# 16-bit grey, a palette with transparency, and the usual ones.
KINDS = {
    "png": ("RGBA", {}),
    "jpeg": ("RGB", {"exif": TURNED}),
    "gif": ("P", {}),
    "tiff": ("I;16", {}),
    "bmp": ("L", {}),
    "webp": ("RGB", {}),
    "ppm": ("RGB", {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow's, about what it reads
def test_damage_anywhere_is_an_image_or_an_error(kind: str, tmp_path: Path) -> None:
    mode, options = KINDS[kind]
    chance = random.Random(0)
    file = io.BytesIO()
    pixels = Image.frombytes("RGB", (20, 14), chance.randbytes(20 * 14 * 3))
    (pixels.convert("L").convert(mode) if mode == "I;16" else pixels.convert(mode)).save(
        file, kind, **options
    )
    path = tmp_path / f"image.{kind}"
    path.write_bytes(file.getvalue())
    assert read_image(path, "RGB").size == read_size(path)[::-1]
    for what, changed in damaged(file.getvalue(), chance, 150):
        path.write_bytes(changed)
        for read in (lambda: read_image(path, "RGB"), lambda: read_size(path)):
            refused, _ = refusal(read)
            assert refused is None or str(path) in refused, what
