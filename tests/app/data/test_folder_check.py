"""All image files are checked before the first epoch, and the damaged ones named together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from anywidth.app.data import folder_check
from anywidth.app.data.folder import FolderLoader
from anywidth.app.data.folder_check import check_images
from anywidth.app.data.image_files import scan_split
from anywidth.errors import AnywidthError

ENDINGS = ("jpg", "png", "webp", "bmp")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    chance = np.random.default_rng(0)
    for split in ("train", "val"):
        for number, kind in enumerate("ab"):
            folder = tmp_path / "set" / split / kind
            folder.mkdir(parents=True)
            for ending in ENDINGS:
                pixels = chance.integers(0, 255, (40, 40 + number, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"picture.{ending}")
    return tmp_path / "set"


def loaders(root: Path) -> list[FolderLoader]:
    return [
        FolderLoader(scan_split(root, split), batch_size=2, size=8, resize=9, workers=0)
        for split in ("train", "val")
    ]


def cut(path: Path, bytes_kept: float = 0.5) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * bytes_kept)])


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many files were opened."""
    opened: list[Path] = []
    real = folder_check.read_size
    monkeypatch.setattr(folder_check, "read_size", lambda path: (opened.append(path), real(path)))
    return lambda: len(opened)


def test_whole_files_pass_and_the_second_time_is_cheap(
    root: Path, looked_at: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    check_images(loaders(root))
    assert looked_at() == 16
    assert "checking images 16/16" in capsys.readouterr().err
    check_images(loaders(root))
    assert looked_at() == 16
    # A file that is written again is looked at again.
    Image.new("RGB", (50, 50)).save(root / "train" / "a" / "picture.png")
    check_images(loaders(root))
    assert looked_at() == 32


def test_all_damaged_files_are_named_at_once(root: Path, cache: Path) -> None:
    damaged = [root / "train" / "a" / f"picture.{ending}" for ending in ENDINGS]
    for path in damaged:
        cut(path)
    empty = root / "val" / "b" / "picture.jpg"
    empty.write_bytes(b"")
    for _ in range(2):  # a failure is not remembered
        with pytest.raises(AnywidthError, match="5 of 16") as caught:
            check_images(loaders(root))
        assert all(str(path) in str(caught.value) for path in [*damaged, empty])
        assert "--skip-corrupt" in str(caught.value)
    assert not cache.exists()


def test_damaged_files_may_be_skipped_with_a_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut(root / "train" / "a" / "picture.jpg")
    with caplog.at_level(logging.WARNING):
        check_images(loaders(root), skip_corrupt=True)
    assert "picture.jpg" in caplog.text


def test_many_damaged_files_are_counted(root: Path) -> None:
    for number in range(30):
        (root / "train" / "a" / f"bad{number}.png").write_bytes(b"no image")
    with pytest.raises(AnywidthError, match="and 10 more"):
        check_images(loaders(root))


def test_bytes_after_the_end_are_no_damage(root: Path) -> None:
    with open(root / "train" / "a" / "picture.jpg", "ab") as file:
        file.write(b"\0" * 500)
    check_images(loaders(root))


def test_only_files_that_are_read_are_checked(root: Path) -> None:
    cut(root / "train" / "a" / "picture.png")
    (loader, _) = loaders(root)
    kept = [i for i, path in enumerate(loader.paths()) if path.suffix != ".png"]
    part = FolderLoader(
        loader.files, batch_size=2, size=8, resize=9, workers=0, positions=torch.tensor(kept)
    )
    check_images([part])


def test_a_dry_run_remembers_nothing_and_a_cache_that_cannot_be_written_is_no_error(
    root: Path, cache: Path
) -> None:
    check_images(loaders(root), remember=False)
    assert not cache.exists()
    cache.write_text("a file, where a folder is needed")
    check_images(loaders(root))


def test_a_changed_byte_in_the_middle_is_found_while_there_is_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "train" / "a" / "picture.png"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(AnywidthError, match="1 of 16"):
        check_images(loaders(root))
    monkeypatch.setattr(folder_check, "DECODING_SECONDS", 0.0)
    check_images(loaders(root))
