import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from anywidth.app.tasks.super_resolution import pictures as super_resolution
from anywidth.app.tasks.super_resolution.pictures import (
    BUNDLED,
    find_images,
    load_pairs,
    read_picture,
)
from anywidth.app.tasks.super_resolution.resize import downscale, upscale
from anywidth.errors import AnywidthError
from anywidth.models.wdsr import wdsr


def noise(height: int, width: int, seed: int = 0, channels: int = 3) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def save(path: Path, pixels: NDArray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def planes(pixels: NDArray) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def png_of_16_bits(levels: NDArray[np.uint16]) -> bytes:
    """An RGB PNG with 16 bits a channel, which Pillow reads but does not write."""
    height, width, _ = levels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    signature = b"\x89PNG\r\n\x1a\n"
    return (
        signature
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def make_div2k(folder: Path, scale: int = 2, split: str = "train") -> dict[str, NDArray]:
    """Two pictures in DIV2K's layout; low resolution is noise, so that its origin shows."""
    for number, (height, width) in enumerate(((24, 36), (48, 24)), start=1):
        save(folder / f"DIV2K_{split}_HR" / f"000{number}.png", noise(height, width, number))
        low = noise(height // scale, width // scale, number + 10)
        low_folder = folder / f"DIV2K_{split}_LR_bicubic" / f"X{scale}"
        save(low_folder / f"000{number}x{scale}.png", low)
    return {"0001": noise(24, 36, 1), "0002": noise(48, 24, 2)}


class TestReadPicture:
    @pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "tif", "PNG"])
    def test_lossless_formats(self, tmp_path: Path, suffix: str) -> None:
        pixels = noise(5, 7)
        assert torch.equal(read_picture(save(tmp_path / f"a.{suffix}", pixels)), planes(pixels))

    @pytest.mark.parametrize("suffix", ["jpg", "jpeg", "webp"])
    def test_lossy_formats(self, tmp_path: Path, suffix: str) -> None:
        pixels = np.full((16, 24, 3), (200, 100, 50), dtype=np.uint8)
        read = read_picture(save(tmp_path / f"a.{suffix}", pixels))
        assert read.shape == (3, 16, 24)
        assert (read.int() - planes(pixels).int()).abs().max() <= 6

    def test_grey_becomes_rgb(self, tmp_path: Path) -> None:
        pixels = noise(4, 5, channels=1)[..., 0]
        read = read_picture(save(tmp_path / "a.png", pixels))
        assert torch.equal(read, torch.from_numpy(pixels).expand(3, -1, -1))

    @pytest.mark.parametrize("channels", [2, 4])
    def test_transparent_parts_show_white(self, tmp_path: Path, channels: int) -> None:
        pixels = noise(2, 3, channels=channels)
        pixels[0, :, -1], pixels[1, :, -1] = 0, 255
        read = read_picture(save(tmp_path / "a.png", pixels))
        assert (read[:, 0] == 255).all()
        colours = torch.from_numpy(pixels[1, :, :-1]).T.expand(3, -1)
        assert torch.equal(read[:, 1], colours)

    def test_palette_with_a_transparent_colour(self, tmp_path: Path) -> None:
        image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "L").convert("P")
        image.putpalette([10, 20, 30, 40, 50, 60])
        image.save(tmp_path / "a.png", transparency=0)
        read = read_picture(tmp_path / "a.png")
        assert read[:, 0].T.tolist() == [[255, 255, 255], [40, 50, 60]]

    @pytest.mark.parametrize("suffix", ["png", "tiff"])
    def test_16_bit_grey_is_scaled(self, tmp_path: Path, suffix: str) -> None:
        levels = np.array([[0, 128, 129, 257, 32768, 65535]], dtype=np.uint16)
        read = read_picture(save(tmp_path / f"a.{suffix}", levels))
        assert read[0, 0].tolist() == [0, 0, 1, 1, 128, 255]
        assert read.shape == (3, 1, 6)

    def test_16_bit_colour_is_scaled(self, tmp_path: Path) -> None:
        levels = noise(3, 4).astype(np.uint16) * 257
        (tmp_path / "a.png").write_bytes(png_of_16_bits(levels))
        assert torch.equal(
            read_picture(tmp_path / "a.png"), planes((levels // 257).astype(np.uint8))
        )

    def test_orientation_of_a_camera_is_applied(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        pixels = np.zeros((8, 16, 3), dtype=np.uint8)
        pixels[:, 8:] = 255
        Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=95)
        Image.fromarray(pixels).save(tmp_path / "b.png", exif=exif)
        pairs = load_pairs(tmp_path, 2)
        assert pairs.high.sizes == ((16, 8), (16, 8))
        assert (pairs.high[0][:, :8] < 30).all()
        assert (pairs.high[1][:, 8:] == 255).all()

    @pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
    def test_what_is_no_image_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "broken.png").write_bytes(content)
        with pytest.raises(AnywidthError, match=r"broken\.png"):
            read_picture(tmp_path / "broken.png")

    def test_floating_point_is_refused(self, tmp_path: Path) -> None:
        save(tmp_path / "a.tiff", np.ones((2, 2), dtype=np.float32))
        with pytest.raises(AnywidthError, match="floating"):
            read_picture(tmp_path / "a.tiff")

    def test_32_bit_beyond_16_is_refused(self, tmp_path: Path) -> None:
        save(tmp_path / "a.tiff", np.array([[0, 70000]], dtype=np.int32))
        with pytest.raises(AnywidthError, match="70000"):
            read_picture(tmp_path / "a.tiff")


class TestFolder:
    def test_low_resolution_is_made_of_the_cut_picture(self, tmp_path: Path) -> None:
        pixels = noise(14, 17)
        save(tmp_path / "deep" / "er" / "b.png", pixels)
        save(tmp_path / "a.bmp", noise(9, 9, 1))
        pairs = load_pairs(tmp_path, 3)
        assert pairs.names == ("a", "deep/er/b")
        assert len(pairs) == 2
        low, high = pairs[1]
        assert torch.equal(high, planes(pixels)[:, :12, :15])
        assert torch.equal(low, downscale(high[None], 3)[0])
        assert pairs.low.sizes == ((3, 3), (4, 5))

    def test_other_and_hidden_files_are_passed_over(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.png", noise(4, 4))
        (tmp_path / "._a.png").write_bytes(b"resource fork")
        (tmp_path / "notes.txt").write_text("text")
        (tmp_path / "folder.png").mkdir()
        assert find_images(tmp_path) == [path]

    @pytest.mark.parametrize("scale", [0, 1.5])
    def test_a_bad_scale_is_named(self, tmp_path: Path, scale: int) -> None:
        with pytest.raises(AnywidthError, match="scale"):
            load_pairs(tmp_path, scale)

    def test_missing_and_empty_folders_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(AnywidthError, match="nowhere"):
            load_pairs(tmp_path / "nowhere")
        (tmp_path / "notes.txt").write_text("text")
        with pytest.raises(AnywidthError, match="images"):
            load_pairs(tmp_path)

    def test_small_pictures_are_left_out_by_name(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(tmp_path / "large.png", noise(16, 20))
        save(tmp_path / "tiny.png", noise(15, 40))
        pairs = load_pairs(tmp_path, 2, patch=8)
        (said,) = caplog.messages
        assert "tiny" in said
        assert pairs.names == ("large",)
        with pytest.raises(AnywidthError, match="64x64"):
            load_pairs(tmp_path, 2, patch=32)

    def test_a_picture_smaller_than_the_scale_has_no_low_resolution(self, tmp_path: Path) -> None:
        save(tmp_path / "a.png", noise(1, 8))
        with pytest.raises(AnywidthError, match="2x2"):
            load_pairs(tmp_path, 2)

    def test_a_truncated_file_among_good_ones_is_named(self, tmp_path: Path) -> None:
        save(tmp_path / "good.png", noise(32, 32))
        whole = io.BytesIO()
        Image.fromarray(noise(32, 32)).save(whole, "PNG")
        (tmp_path / "half.png").write_bytes(whole.getvalue()[:1000])
        with pytest.raises(AnywidthError, match=r"half\.png"):
            load_pairs(tmp_path)


class TestDiv2k:
    @pytest.mark.parametrize("split", ["train", "valid"])
    def test_given_low_resolution_is_used(self, tmp_path: Path, split: str) -> None:
        pictures = make_div2k(tmp_path, split=split)
        pairs = load_pairs(tmp_path, 2, split=split)
        assert pairs.names == (f"DIV2K_{split}_HR/0001", f"DIV2K_{split}_HR/0002")
        assert torch.equal(pairs[1][1], planes(pictures["0002"]))
        assert torch.equal(pairs[1][0], planes(noise(24, 12, 12)))

    def test_without_that_scale_low_resolution_is_made(self, tmp_path: Path) -> None:
        make_div2k(tmp_path, scale=2)
        pairs = load_pairs(tmp_path, 4)
        low, high = pairs[0]
        assert torch.equal(low, downscale(high[None], 4)[0])

    def test_the_other_split_is_not_taken_instead(self, tmp_path: Path) -> None:
        make_div2k(tmp_path)
        with pytest.raises(AnywidthError, match="DIV2K_valid_HR"):
            load_pairs(tmp_path, split="valid")
        with pytest.raises(AnywidthError, match="test"):
            load_pairs(tmp_path, split="test")

    def test_names_that_do_not_match_are_listed(self, tmp_path: Path) -> None:
        make_div2k(tmp_path)
        low = tmp_path / "DIV2K_train_LR_bicubic" / "X2"
        (low / "0001x2.png").rename(low / "0003x2.png")
        with pytest.raises(AnywidthError, match="0003x2"):
            load_pairs(tmp_path)

    def test_sizes_that_do_not_match_are_named(self, tmp_path: Path) -> None:
        make_div2k(tmp_path)
        save(tmp_path / "DIV2K_train_LR_bicubic" / "X2" / "0002x2.png", noise(24, 13))
        with pytest.raises(AnywidthError, match="24x13"):
            load_pairs(tmp_path)


class TestMemoryMap:
    def test_mapped_pixels_are_the_same(self, tmp_path: Path) -> None:
        make_div2k(tmp_path / "data")
        inside = load_pairs(tmp_path / "data", 2)
        mapped = load_pairs(tmp_path / "data", 2, memory_limit=0)
        cached = load_pairs(tmp_path / "data", 2, memory_limit=0, cache=tmp_path / "new" / "cache")
        for pairs in (mapped, cached):
            assert torch.equal(pairs.high.pixels, inside.high.pixels)
            assert torch.equal(pairs.low.pixels, inside.low.pixels)
        files = sorted(path.name for path in (tmp_path / "new" / "cache").iterdir())
        assert len(files) == 2
        assert all(name.endswith(".rgb") for name in files)

    def test_a_cache_is_used_until_a_file_changes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decoded = []

        def count(path: Path) -> torch.Tensor:
            decoded.append(path.name)
            return read_picture(path)

        monkeypatch.setattr(super_resolution, "read_picture", count)
        data, cache = tmp_path / "data", tmp_path / "cache"
        save(data / "a.png", noise(8, 8))
        first = load_pairs(data, 2, memory_limit=0, cache=cache)
        assert decoded == ["a.png"]
        assert torch.equal(load_pairs(data, 2, memory_limit=0, cache=cache)[0][1], first[0][1])
        assert decoded == ["a.png"]
        save(data / "a.png", noise(8, 8, seed=5))
        changed = load_pairs(data, 2, memory_limit=0, cache=cache)
        assert torch.equal(changed[0][1], planes(noise(8, 8, seed=5)))

    def test_a_cache_cut_short_is_written_again(self, tmp_path: Path) -> None:
        data, cache = tmp_path / "data", tmp_path / "cache"
        save(data / "a.png", noise(8, 8))
        load_pairs(data, 2, memory_limit=0, cache=cache)
        for path in cache.iterdir():
            path.write_bytes(path.read_bytes()[:10])
        pairs = load_pairs(data, 2, memory_limit=0, cache=cache)
        assert torch.equal(pairs[0][1], planes(noise(8, 8)))

    def test_a_failed_decode_leaves_no_file(self, tmp_path: Path) -> None:
        data, cache = tmp_path / "data", tmp_path / "cache"
        whole = io.BytesIO()
        Image.fromarray(noise(32, 32)).save(whole, "PNG")
        data.mkdir()
        (data / "half.png").write_bytes(whole.getvalue()[:1000])
        with pytest.raises(AnywidthError, match=r"half\.png"):
            load_pairs(data, 2, memory_limit=0, cache=cache)
        assert list(cache.iterdir()) == []

    def test_a_temporary_file_is_gone_afterwards(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(super_resolution.tempfile, "tempdir", str(tmp_path / "scratch"))
        (tmp_path / "scratch").mkdir()
        save(tmp_path / "data" / "a.png", noise(8, 8))
        pairs = load_pairs(tmp_path / "data", 2, memory_limit=0)
        assert list((tmp_path / "scratch").iterdir()) == []
        assert torch.equal(pairs[0][1], planes(noise(8, 8)))


class TestBundled:
    def test_both_splits_are_there_with_their_licence(self) -> None:
        assert len(load_pairs(BUNDLED / "train")) == 12
        assert len(load_pairs(BUNDLED / "eval")) == 4
        assert "public domain" in (BUNDLED / "LICENSE.txt").read_text()
        assert sum(path.stat().st_size for path in find_images(BUNDLED)) < 1_500_000

    def test_a_few_steps_of_training_beat_bicubic(self) -> None:
        """The pictures carry what super-resolution is to learn: here on one of them."""
        torch.manual_seed(0)
        low, high = load_pairs(BUNDLED / "train")[0]
        low = low[None, :, :64, :64].float() / 255
        high = high[None, :, :128, :128].float() / 255
        bicubic = (upscale(low, 2) - high).square().mean()
        network = wdsr(channels=8, blocks=2)
        optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
        for _ in range(120):
            loss = (network(low) - high).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert (network(low) - high).square().mean() < bicubic
