"""Folders with links in a circle, pipes and devices, and worker processes that end or stop."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Answer, assert_one_line, assert_refused, command

from anywidth.app.cli import explained
from anywidth.app.data import decoding_workers
from anywidth.app.data.arrays import read_idx
from anywidth.app.data.folder import FolderLoader
from anywidth.app.data.image_files import scan_split
from anywidth.errors import AnywidthError
from anywidth.files import load_tensors, read_json

SMALL = {"batch_size": 2, "size": 16, "resize": 20}
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize(("link", "target"), [("cat/loop", ".."), ("cat/a/loop", "../../..")])
def test_a_link_to_a_folder_above_is_refused(image_folder: Path, link: str, target: str) -> None:
    """It made 4,840 images of 40, with wrong labels."""
    path = image_folder / "train" / link
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)
    with pytest.raises(AnywidthError, match="loop"):
        scan_split(image_folder, "train")


def test_links_to_each_other_are_refused(image_folder: Path) -> None:
    (image_folder / "train" / "cat" / "x").symlink_to("../dog")
    (image_folder / "train" / "dog" / "y").symlink_to("../cat")
    with pytest.raises(AnywidthError, match="link"):
        scan_split(image_folder, "train")


def test_a_link_to_another_folder_is_followed(image_folder: Path, tmp_path: Path) -> None:
    before = len(scan_split(image_folder, "train"))
    elsewhere = tmp_path / "elsewhere"
    (image_folder / "train" / "cat").rename(elsewhere)
    (image_folder / "train" / "cat").symlink_to(elsewhere)
    assert len(scan_split(image_folder, "train")) == before


def begun(folder: Path) -> tuple[Iterator[Any], multiprocessing.process.BaseProcess]:
    """The rest of an epoch, and the worker that decodes it."""
    loader = FolderLoader(scan_split(folder, "train"), **SMALL, workers=1)
    others = set(multiprocessing.active_children())
    batches = loader.epoch(0)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    assert worker.pid is not None
    return batches, worker


@forks
def test_a_stopped_worker_is_named(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_workers, "SECONDS", 0.5)
    batches, worker = begun(image_folder)
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(AnywidthError, match=str(worker.pid)):
        list(batches)
    worker.join(60)
    assert not worker.is_alive(), "Python would wait for it at its end"


@forks
def test_a_killed_worker_is_a_failure_that_is_explained(image_folder: Path) -> None:
    batches, worker = begun(image_folder)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        list(batches)
    assert "--resume" in str(explained(raised.value))


@forks
@pytest.mark.parametrize("error", [EOFError, ConnectionResetError])
def test_a_worker_killed_while_it_hands_over_a_batch_is_explained(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Its sockets close before the process is gone, which torch takes for another error."""
    batches, worker = begun(image_folder)

    def broken(loader: object) -> None:
        os.kill(worker.pid, signal.SIGKILL)
        raise error

    reading = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._next_data"
    monkeypatch.setattr(reading, broken)
    with pytest.raises(RuntimeError) as raised:
        list(batches)
    assert "--resume" in str(explained(raised.value))


def test_failures_of_the_machine_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory:\n you tried\n")

    monkeypatch.setattr("anywidth.app.tasks.registry.recipe", fail)
    answer = command("train", "demo")
    assert answer.code == 1
    assert_one_line(answer, "memory")
    assert explained(RuntimeError("a mistake in the program")) is None


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_files_are_read(tmp_path: Path, kind: str) -> None:
    """Reading a pipe that nobody writes to, or /dev/zero, never ends."""
    path = tmp_path / "odd.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    for read in (read_json, load_tensors, lambda path: read_idx(path, 1)):
        with pytest.raises(AnywidthError, match="pipe"):
            read(path)


def train_on(folder: Path, out: Path, *options: str) -> Answer:
    network = ("--model", "tiny_networks:tiny_rgb", "--total-stride", "none", "--divisor", "4")
    data = ("--data", "folder", "--data-dir", folder, "--image-size", "16", "--workers", "0")
    rest = ("--batch-size", "4", "--epochs", "1", "--device", "cpu", "--no-report")
    return command("train", *network, *data, *rest, *options, "--out", out)


def test_validation_images_that_are_all_corrupt_are_an_error(
    image_folder: Path, tmp_path: Path
) -> None:
    for path in (image_folder / "val").glob("*/*.jpg"):
        path.write_bytes(b"no image")
    answer = train_on(image_folder, tmp_path / "run", "--skip-corrupt")
    assert answer.code == 2
    assert "validation" in answer.errors.splitlines()[-1]


def test_one_class_is_refused_before_training(image_folder: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(image_folder / split / "dog")
    assert_refused(train_on(image_folder, tmp_path / "run"), "cat")
