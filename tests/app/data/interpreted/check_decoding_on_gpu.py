"""Images as a GPU decodes them, here by torchvision on the CPU and by Triton's interpreter."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import interpreter  # noqa: F401  (makes Triton's interpreter work here)
import pytest
import torch
from PIL import Image
from torch import Tensor

from anywidth.app.cli import explained
from anywidth.app.data import decoding_on_gpu, decoding_workers, folder_images
from anywidth.app.data.decoding_on_gpu import jpeg_batches, jpeg_files
from anywidth.app.data.folder import FolderLoader
from anywidth.app.data.folder_augment import FolderAugmentation, crop_box, draw
from anywidth.app.data.image_files import ImageFiles, scan_split
from anywidth.errors import AnywidthError

Batches = list[tuple[Tensor, Tensor]]
LEVELS = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}
OPTIONS = {
    **LEVELS,
    "batch_size": 4,
    "size": 16,
    "resize": 20,
    "workers": 0,
    "augmentation": FolderAugmentation(jitter=0.0),
    "shuffle": True,
    "drop_last": True,
    "seed": 7,
}
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def threads() -> int:
    """All but those of queues to processes, which stay as long as the queue."""
    return len([one for one in threading.enumerate() if "QueueFeeder" not in one.name])


@pytest.fixture(autouse=True)
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the files that the decoder is given; no thread is left at the end."""
    sizes: list[int] = []
    decode = jpeg_batches.decode_jpegs

    def watched(files: list[Tensor], device: torch.device) -> list[Tensor]:
        sizes.extend(len(file) for file in files)
        return decode(files, device)

    monkeypatch.setattr(decoding_on_gpu, "DECODES_ON_GPU", True)
    monkeypatch.setattr(decoding_on_gpu, "_missing", lambda device: None)
    monkeypatch.setattr(jpeg_batches, "decode_jpegs", watched)
    before = threads()
    yield sizes
    gc.collect()
    assert threads() <= before


def make(files: ImageFiles, **options: object) -> FolderLoader:
    return FolderLoader(files, **{**OPTIONS, **options})


def by_cpu(files: ImageFiles, **options: object) -> FolderLoader:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding_on_gpu, "DECODES_ON_GPU", False)
        return make(files, **options)


def assert_same(first: Batches, second: Batches, levels: float = 1.01) -> None:
    for (images, labels), (others, other_labels) in zip(first, second, strict=True):
        assert torch.equal(labels, other_labels)
        assert images.shape == others.shape
        assert not len(images) or float((images - others).abs().max()) <= levels


def without_tables(path: Path) -> Path:
    """Damage that no header shows: no decoder can build this Huffman table."""
    data = bytearray(path.read_bytes())
    place = data.index(b"\xff\xc4") + 5
    data[place : place + 16] = b"\xff" * 16
    path.write_bytes(data)
    return path


def truncate(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


# ---- the images ----------------------------------------------------------------------------------


def test_images_are_those_of_the_cpu(
    image_folder: Path, decoded: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    files = scan_split(image_folder, "train")
    loader, other = make(files), by_cpu(files)
    with caplog.at_level(logging.INFO, logger="anywidth"):
        assert_same(list(loader.epoch(2)), list(other.epoch(2)))
        next(loader.epoch(3))
    assert caplog.messages == [
        f"images of {files.folder} are decoded by the GPU",
        f"images of {files.folder} are decoded by the CPU (decoding on a GPU is switched off)",
    ]
    assert sorted(decoded[:12]) == sorted(files.path(n).stat().st_size for n in range(12))


def test_crops_are_drawn_as_by_the_cpu(image_folder: Path) -> None:
    files = scan_split(image_folder, "train")
    loader = make(files)
    decoded, *_ = loader._decoding
    found = decoded.dataset[folder_images.Request(1, 5, [3, 0, 8])]  # type: ignore[index]
    assert found.indices == [3, 0, 8]
    for row, index in enumerate(found.indices):
        left, top, right, bottom = crop_box(40, 30, draw(7, 5, index).crop, 0.25)
        header = decoded.dataset.slots.headers[1, row].tolist()  # type: ignore[attr-defined]
        assert header[1:] == [40, 30, left, top, right - left, bottom - top]


@forks
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on one core
def test_workers_resuming_and_ranks_do_not_change_what_is_seen(image_folder: Path) -> None:
    files = scan_split(image_folder, "train")
    alone = list(make(files).epoch(3))
    by_workers = make(files, workers=2)
    left = by_workers.epoch(0)
    next(left)
    assert_same(list(by_workers.epoch(3)), alone, 0)
    assert_same(list(by_workers.epoch(3, 1)), alone[1:], 0)
    assert list(by_workers.epoch(3, 3)) == []
    ranks = [list(make(files, rank=rank, world_size=2).epoch(3)) for rank in (0, 1)]
    for whole, first, second in zip(alone, *ranks, strict=True):
        assert torch.equal(torch.cat([first[0], second[0]]), whole[0])
        assert torch.equal(torch.cat([first[1], second[1]]), whole[1])


@forks
def test_small_portions_change_nothing(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = scan_split(image_folder, "train")
    options = {"batch_size": 7, "drop_last": False}
    whole = list(make(files, **options).epoch(1))
    monkeypatch.setattr(folder_images, "_MOST_IMAGES", 2)
    monkeypatch.setattr(jpeg_batches, "_MOST_PIXELS_AT_ONCE", 40 * 30 + 1)
    monkeypatch.setattr("anywidth.app.data.folder.PARTS_AT_ONCE", 2)
    monkeypatch.setattr(jpeg_batches, "PARTS_AT_ONCE", 2)
    by_worker = make(files, workers=1, **options)
    next(by_worker.epoch(0))
    assert_same(list(by_worker.epoch(1)), whole, 0)


def test_a_rank_without_a_sample_gets_an_empty_part(image_folder: Path) -> None:
    files = scan_split(image_folder, "train")
    options = {"batch_size": 11, "world_size": 2, "drop_last": False}
    parts = [list(make(files, rank=rank, **options))[-1][0].shape for rank in (0, 1)]
    assert parts == [(0, 3, 16, 16), (1, 3, 16, 16)]


# ---- files of other kinds ------------------------------------------------------------------------


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


KINDS = {
    "plain": (True, "RGB", {}),
    "grey": (True, "L", {}),
    "progressive": (True, "RGB", {"progressive": True}),
    "fine": (True, "RGB", {"subsampling": 0}),
    "printed": (False, "CMYK", {}),
    "RGB inside": (False, "RGB", {"keep_rgb": True}),
    "turned": (False, "RGB", {"exif": turned()}),
    "png": (False, "RGB", {"format": "PNG"}),
    "png with transparency": (False, "RGBA", {"format": "PNG"}),
}


def test_only_plain_files_are_decoded_by_the_gpu(tmp_path: Path, decoded: list[int]) -> None:
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    picture = torch.randint(0, 256, (30, 40, 3), dtype=torch.uint8)
    plain = []
    for name, (is_plain, mode, options) in KINDS.items():
        path = folder / f"{name}.jpg"
        Image.fromarray(picture.numpy()).convert(mode).save(path, **{"format": "JPEG", **options})
        if is_plain:
            plain.append(path.stat().st_size)
    files = scan_split(tmp_path, "train")
    options = {"batch_size": len(KINDS)}
    assert_same(list(make(files, **options)), list(by_cpu(files, **options)))
    assert sorted(decoded) == sorted(plain)


def test_large_files_and_pictures_are_left_to_the_workers(
    image_folder: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = scan_split(image_folder, "train")
    noise = torch.randint(0, 256, (150, 200, 3), dtype=torch.uint8)
    Image.fromarray(noise.numpy()).save(files.path(3), quality=95)
    loader, options = make(files), {"drop_last": False, "batch_size": 12}
    assert 2000 < loader._file_bytes < files.path(3).stat().st_size
    assert_same(list(make(files, **options)), list(by_cpu(files, **options)))
    assert len(decoded) == 11
    monkeypatch.setattr(jpeg_files, "_MOST_PIXELS", 1000)
    list(make(files))
    assert len(decoded) == 11


def test_validation_and_calibration_never_use_it(image_folder: Path, decoded: list[int]) -> None:
    files = scan_split(image_folder, "train")
    list(make(files, augmentation=None, shuffle=False))
    list(make(files).subset(7))
    list(make(files).subset(7, augmented=True))
    assert decoded == []


# ---- damaged files -------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [truncate, without_tables, Path.unlink])
@pytest.mark.parametrize("workers", [0, 1])
@forks
def test_a_damaged_file_is_named_in_the_same_words(
    image_folder: Path, damage: object, workers: int
) -> None:
    files = scan_split(image_folder, "train")
    damage(files.path(8))  # type: ignore[operator]
    said = []
    for loader in (make(files, workers=workers), by_cpu(files, workers=workers)):
        with pytest.raises(AnywidthError) as raised:
            list(loader.epoch(0))
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert str(files.path(8)) in said[0]


def test_damaged_files_are_skipped_and_named_if_asked(
    image_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = scan_split(image_folder, "train")
    truncate(files.path(1))
    without_tables(files.path(8))
    without_tables(files.path(10))
    options = {"skip_corrupt": True, "drop_last": False, "batch_size": 5}
    loader, other = make(files, **options), by_cpu(files, **options)
    with caplog.at_level(logging.WARNING, logger="anywidth"):
        found, expected = list(loader.epoch(2)), list(other.epoch(2))
    assert_same(found, expected)
    assert loader.corrupt == other.corrupt
    assert len(loader.corrupt) == 3
    refused, *others = caplog.messages
    assert "refuses" in refused
    assert len(others) == 2
    assert sorted(others[0]) == sorted(others[1])


def test_a_batch_of_damaged_files_is_an_error(image_folder: Path) -> None:
    files = scan_split(image_folder, "train")
    for index in range(12):
        without_tables(files.path(index))
    with pytest.raises(AnywidthError, match="all 4 of its images are corrupt"):
        next(make(files, skip_corrupt=True).epoch(0))


# ---- the decoder, threads and processes ----------------------------------------------------------


@pytest.mark.parametrize("answer", ["an error", "another size"])
def test_what_the_decoder_refuses_is_decoded_by_the_cpu(
    image_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: str,
) -> None:
    def refusing(files: list[Tensor], device: torch.device) -> list[Tensor]:
        if answer == "an error":
            raise RuntimeError("Failed to decode batch: 3")
        return [torch.zeros(3, 30, 39, dtype=torch.uint8) for _ in files]

    monkeypatch.setattr(jpeg_batches, "decode_jpegs", refusing)
    files = scan_split(image_folder, "train")
    assert_same(list(make(files).epoch(1)), list(by_cpu(files).epoch(1)), 0)
    (message,) = caplog.messages
    assert "refuses" in message


@forks
@pytest.mark.parametrize("workers", [0, 1])
def test_another_error_of_the_decoder_ends_the_epoch(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def failing(files: list[Tensor], device: torch.device) -> list[Tensor]:
        raise ValueError("no such mode")

    files = scan_split(image_folder, "train")
    loader = make(files, workers=workers)
    with monkeypatch.context() as patch:
        patch.setattr(jpeg_batches, "decode_jpegs", failing)
        with pytest.raises(ValueError, match="no such mode"):
            list(loader.epoch(0))
    assert_same(list(loader.epoch(1)), list(by_cpu(files).epoch(1)))


def test_streams_wait_for_each_other(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU is asked for: a batch in four portions, which is handed over."""
    done: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            done.append("wait for memory")

        def wait_event(self, event: object) -> None:
            done.append("wait for the batch")

    class Event:
        def record(self, stream: Stream) -> None:
            done.append("batch is ready")

    def note(name: str) -> None:
        called = getattr(jpeg_batches.JpegBatches, name)

        def noted(*arguments: object) -> object:
            done.append(name)
            return called(*arguments)

        monkeypatch.setattr(jpeg_batches.JpegBatches, name, noted)

    note("_crop")
    monkeypatch.setattr(jpeg_batches, "own_stream", lambda device: Stream())
    monkeypatch.setattr(jpeg_batches, "_MOST_PIXELS_AT_ONCE", 3 * 40 * 30)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: done.append("keep memory"))
    files = scan_split(image_folder, "train")
    found = list(make(files, batch_size=12))
    portions = ["wait for memory", "_crop"] * 4
    assert done == [*portions, "batch is ready", "wait for the batch", "keep memory"]
    assert len(found) == 1


def test_an_epoch_ends_when_another_begins(image_folder: Path) -> None:
    loader = make(scan_split(image_folder, "train"))
    first = loader.epoch(0)
    next(first)
    second = loader.epoch(1)
    next(second)
    with pytest.raises(AnywidthError, match="epoch 0"):
        next(first)
    assert len(list(second)) == 2


@forks
def test_an_epoch_that_is_left_leaves_no_thread(image_folder: Path) -> None:
    before = threads()
    loader = make(scan_split(image_folder, "train"), workers=1)
    batches = loader.epoch(0)
    next(batches)
    assert threads() > before
    batches.close()  # type: ignore[attr-defined]
    assert threads() == before
    batches = loader.epoch(1)
    next(batches)
    gc.disable()
    try:
        workers = set(multiprocessing.active_children())
        freed = weakref.ref(loader)
        del batches, loader
        assert freed() is None
        assert threads() == before
        assert len(workers - set(multiprocessing.active_children())) == 1
    finally:
        gc.enable()


def begun(folder: Path) -> tuple[Iterator[object], multiprocessing.process.BaseProcess]:
    loader = make(scan_split(folder, "train"), workers=1, positions=torch.arange(12).repeat(40))
    others = set(multiprocessing.active_children())
    batches = loader.epoch(0)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    return batches, worker


@forks
def test_a_stopped_worker_is_named(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_workers, "SECONDS", 0.5)
    monkeypatch.setattr(folder_images, "_MOST_IMAGES", 1)
    batches, worker = begun(image_folder)
    os.kill(worker.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    with pytest.raises(AnywidthError, match=str(worker.pid)):
        list(batches)
    worker.join(60)
    assert not worker.is_alive()


@forks
def test_a_killed_worker_is_a_failure_that_is_explained(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_images, "_MOST_IMAGES", 1)
    batches, worker = begun(image_folder)
    os.kill(worker.pid, signal.SIGKILL)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as raised:
        list(batches)
    assert "--resume" in str(explained(raised.value))
