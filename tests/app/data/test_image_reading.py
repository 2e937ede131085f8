"""Pictures are read as people see them, or refused in one sentence."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from anywidth_runtime.errors import RequestError
from anywidth_runtime.server.picture_files import PictureInput
from command_line import assert_refused, command, succeed
from finished_runs import classifier_run
from PIL import Image

from anywidth.app.data import image_reading
from anywidth.app.data.folder import FolderLoader
from anywidth.app.data.folder_images import FolderImages, Request, Slots
from anywidth.app.data.image_files import ImageFiles, scan_split
from anywidth.app.data.image_reading import decode_crop, read_image, read_size
from anywidth.app.tasks.classification.trained import _read
from anywidth.app.tasks.super_resolution.pictures import read_picture
from anywidth.errors import AnywidthError

UPRIGHT = np.arange(12 * 20, dtype=np.uint8).reshape(12, 20)


def plain(folder: Path) -> Path:
    Image.fromarray(UPRIGHT).save(folder / "picture.png")
    return folder / "picture.png"


def deep(folder: Path) -> Path:
    Image.fromarray(UPRIGHT.astype(np.uint16) * 257).save(folder / "picture.png")
    return folder / "picture.png"


def deep_tiff(folder: Path) -> Path:
    Image.fromarray(UPRIGHT.astype(np.uint16) * 257).save(folder / "picture.tif")
    return folder / "picture.tif"


def turned(folder: Path) -> Path:
    """Lies on its side, as cameras write it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(UPRIGHT).copy()).save(folder / "picture.png", exif=exif)
    return folder / "picture.png"


def with_palette(folder: Path) -> Path:
    image = Image.fromarray(UPRIGHT)
    image = image.convert("P")
    image.putpalette([level for level in range(256) for _ in range(3)])
    image.putdata(UPRIGHT.reshape(-1).tolist())
    image.save(folder / "picture.png", transparency=bytes(range(256)))
    return folder / "picture.png"


KINDS = [plain, deep, deep_tiff, turned, with_palette]


@pytest.mark.parametrize("save", KINDS)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_every_kind_shows_the_same_picture(
    save: Callable[[Path], Path], mode: str, tmp_path: Path
) -> None:
    path = save(tmp_path)
    image = read_image(path, mode)
    assert image.mode == mode
    assert np.array_equal(np.asarray(image.convert("L")), UPRIGHT)
    assert read_size(path) == UPRIGHT.shape


def bomb(folder: Path) -> Path:
    """A PNG file of a few bytes that claims 10^10 pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    return folder / "picture.png"


def floating(folder: Path) -> Path:
    Image.fromarray(UPRIGHT.astype(np.float32)).save(folder / "picture.tif")
    return folder / "picture.tif"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "picture.png")
    return folder / "picture.png"


def endless(folder: Path) -> Path:
    (folder / "picture.png").symlink_to("/dev/zero")
    return folder / "picture.png"


UNREADABLE = [bomb, floating, pipe, endless]


@pytest.mark.parametrize("save", UNREADABLE)
@pytest.mark.parametrize("read", [read_image, read_size, read_picture])
def test_what_cannot_be_read_is_named(
    save: Callable[[Path], Path], read: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(AnywidthError, match="picture"):
        read(save(tmp_path))


def test_predict_reads_them_alike(tmp_path: Path) -> None:
    run = classifier_run(tmp_path / "run", [1.0])
    options = ("--trust", "--device", "cpu")
    answers = {succeed("predict", run, save(tmp_path), *options).output for save in KINDS}
    assert len(answers) == 1
    for number, save in enumerate(UNREADABLE):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_refused(command("predict", run, save(folder), *options), "picture")


@pytest.mark.parametrize("save", KINDS)
def test_a_folder_is_trained_with_what_people_see(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    save(tmp_path / "train" / "a")
    files = scan_split(tmp_path, "train")
    loader = FolderLoader(
        files, batch_size=1, size=12, resize=12, mean=[0] * 3, std=[1] * 3, workers=0
    )
    ((images, _),) = loader
    assert torch.equal((images[0, 0] * 255).round(), torch.tensor(UPRIGHT[:, 4:16]).float())


def oddly_sized(folder: Path) -> Path:
    """The middle of 37 pixels of 47 is not in the middle of a pixel."""
    levels = np.random.default_rng(0).integers(0, 256, (47, 61, 3), dtype=np.uint8)
    Image.fromarray(levels).save(folder / "picture.png")
    return folder / "picture.png"


def strip(folder: Path) -> Path:
    """One pixel high: resized whole, it would fill 8 GB."""
    Image.new("RGB", (200_000, 1), "teal").save(folder / "picture.png")
    return folder / "picture.png"


@pytest.mark.parametrize("save", [*KINDS, oddly_sized, strip])
def test_validation_predict_and_the_server_see_the_same(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = save(tmp_path)
    files = ImageFiles(tmp_path, [(str(path), 0)], ["a"])
    slots = Slots(1, 100, is_shared=False)
    images = FolderImages(files, slots, size=100, resize=114, augmentation=None, seed=0)
    assert images[Request(0, 0, [0])].indices == [0]
    seen = slots.images[0, 0].permute(2, 0, 1)
    assert torch.equal(_read(path, (3, 100, 100), crops=True), seen)
    takes = PictureInput("input", "float32", 3, (100, 100), shorter=114)
    served = torch.from_numpy(takes.read(path.read_bytes(), most_pixels=10**6)[0])
    assert torch.equal((served * 255).round().to(torch.uint8), seen)


def too_deep(folder: Path) -> Path:
    Image.fromarray(UPRIGHT.astype(np.int32) * 70_000).save(folder / "picture.tif")
    return folder / "picture.tif"


@pytest.mark.parametrize("save", [floating, too_deep])
def test_the_server_refuses_what_predict_refuses(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    takes = PictureInput("input", "float32", 3, (12, 12))
    with pytest.raises(RequestError, match="bits"):
        takes.read(save(tmp_path).read_bytes(), most_pixels=10**6)


def photo(width: int, height: int) -> Image.Image:
    """Shapes of many sizes, fine ones too."""
    y, x = np.mgrid[:height, :width] / 64.0
    waves = [np.sin(x * y / 3 + n) + 0.4 * np.sin(9 * x + n) * np.cos(7 * y) for n in range(3)]
    return Image.fromarray((90 * np.stack(waves, 2) + 127).clip(0, 255).astype(np.uint8))


def lying(folder: Path) -> Path:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo(960, 1280).save(folder / "lying.jpg", quality=95, exif=exif)
    return folder / "lying.jpg"


def standing(folder: Path) -> Path:
    photo(1280, 960).save(folder / "standing.jpg", quality=95)
    return folder / "standing.jpg"


def printed(folder: Path) -> Path:
    photo(1280, 960).convert("CMYK").save(folder / "printed.jpg", quality=95)
    return folder / "printed.jpg"


@pytest.mark.parametrize("save", [lying, standing, printed])
@pytest.mark.parametrize(
    ("box", "coarseness"), [((240, 80, 1200, 720), 4), ((96, 40, 800, 440), 2)]
)
def test_a_crop_that_is_decoded_coarsely_looks_the_same(
    save: Callable[[Path], Path], box: tuple[int, ...], coarseness: int, tmp_path: Path
) -> None:
    path, size = save(tmp_path), 80
    whole = read_image(path, "RGB")
    assert whole.size == (1280, 960)
    crop = decode_crop(path, lambda width, height: box if width == 1280 else (), size)
    coarse = Image.fromarray(crop)
    assert coarse.size == tuple((box[n + 2] - box[n]) // coarseness for n in (0, 1))
    seen, expected = (
        np.asarray(image.resize((size, size), Image.Resampling.BILINEAR)).astype(int)
        for image in (coarse, whole.crop(box))
    )
    difference = abs(seen - expected)
    assert difference.mean() < 2
    assert np.quantile(difference, 0.99) < 12
    assert expected.std() > 30


@pytest.mark.parametrize("save", [standing, lying, plain, deep, turned, with_palette])
def test_a_small_crop_has_the_pixels_of_the_whole_image(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    path, box = save(tmp_path), (3, 1, 17, 9)
    crop = decode_crop(path, lambda width, height: box, 8)
    assert np.array_equal(crop, np.asarray(read_image(path, "RGB").crop(box)))


# ---- with simplejpeg and without -----------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that simplejpeg decodes."""
    shapes: list[tuple[int, ...]] = []
    whole = simplejpeg.decode_jpeg

    def watched(*arguments: object, **named: object) -> np.ndarray:
        found = whole(*arguments, **named)
        shapes.append(found.shape)
        return found

    monkeypatch.setattr(simplejpeg, "decode_jpeg", watched)
    return shapes


FORMS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "RGB inside": {"keep_rgb": True},
}


@pytest.mark.parametrize("width", [641, 640, 97])
@pytest.mark.parametrize("form", FORMS)
def test_a_faster_decoder_gives_pillow_s_pixels(
    form: str, width: int, tmp_path: Path, decoded: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "photo.jpg"
    photo(width, 479).save(path, quality=90, **FORMS[form])
    boxes = [(0, 0, width, 479), (5, 3, width - 4, 470)]
    fast = [decode_crop(path, lambda w, h, box=box: box, 60) for box in boxes]
    assert len(decoded) == 2
    assert (decoded[0][1] < width) == (width > 97)  # both decoders at a lower resolution
    monkeypatch.setattr(image_reading, "simplejpeg", None)
    slow = [decode_crop(path, lambda w, h, box=box: box, 60) for box in boxes]
    assert len(decoded) == 2
    for one, other in zip(fast, slow, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("save", [lying, printed, with_palette])
def test_what_is_not_a_usual_jpeg_is_left_to_pillow(
    save: Callable[[Path], Path], tmp_path: Path, decoded: list
) -> None:
    decode_crop(save(tmp_path), lambda width, height: (0, 0, 16, 8), 8)
    assert decoded == []


@pytest.mark.parametrize("cut", [200, 2000])
def test_a_damaged_jpeg_is_what_it_is_to_pillow(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "photo.jpg"
    photo(320, 240).save(path, quality=90)
    whole = path.read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:-cut], whole[:middle] + bytes(cut) + whole[middle + cut :]):
        path.write_bytes(damaged)
        found = []
        for package in (simplejpeg, None):
            monkeypatch.setattr(image_reading, "simplejpeg", package)
            try:
                found.append(decode_crop(path, lambda width, height: (0, 0, 320, 240), 224))
            except OSError as error:
                found.append(str(error))
        assert type(found[0]) is type(found[1])
        assert np.array_equal(*found) if isinstance(found[0], np.ndarray) else found[0] == found[1]
