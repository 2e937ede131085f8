"""Results of a run are never made with data that it was not trained with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import assert_refused, command, succeed
from finished_runs import upscaler_run
from PIL import Image

from anywidth.app.tasks.super_resolution.pictures import load_pairs

CODE = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Conv2d(3, 16, 3, stride=4), nn.BatchNorm2d(16), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))
"""


EXTRA = {"tune": ("--widths", "1.0"), "search": ("--macs", "100k")}


def write_images(
    folder: Path, classes: tuple[str, ...], count: int = 6, size: tuple[int, int] = (20, 16)
) -> Path:
    for split in ("train", "val"):
        for shade, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                color = (40 * shade, 10 * number, 99)
                Image.new("RGB", size, color).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and its data beside it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small_network.py").write_text(CODE)
    write_images(folder / "data", ("cat", "dog"))
    options = ("--data", "folder", "--data-dir", folder / "data", "--image-size", "16", "--workers",
               "0", "--batch-size", "4", "--epochs", "2", "--device", "cpu")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        succeed("train", "--model", "small_network:build", *options, "--no-report", "--out",
                folder / "run")  # fmt: skip
        succeed("spectrum", folder / "run", "--widths", "0.5,1.0", "--no-latency", "--trust")
        yield folder / "run"


def other_names(folder: Path) -> Path:
    return write_images(folder, ("bee", "cat"))


def more_classes(folder: Path) -> Path:
    return write_images(folder, ("bee", "cat", "dog"))


def fewer_images(folder: Path) -> Path:
    return write_images(folder, ("cat", "dog"), 5)


def other_pictures(folder: Path) -> Path:
    """As many files of the same names."""
    return write_images(folder, ("cat", "dog"), size=(30, 24))


def other_file_names(folder: Path) -> Path:
    write_images(folder, ("cat", "dog"))
    (folder / "train" / "cat" / "0.png").rename(folder / "train" / "cat" / "zero.png")
    return folder


CHANGES = [other_names, more_classes, fewer_images, other_pictures, other_file_names]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["spectrum", "calibrate", "train", "tune", "search"])
def test_other_data_is_refused(
    name: str, change: Callable[[Path], Path], trained: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    if name == "train":
        (run / "finished.json").unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    place = ("--data-dir", change(tmp_path / "data"), "--trust", "--device", "cpu")
    resume = ("--resume",) if name == "train" else ()
    answer = command(name, *resume, run, *place, *EXTRA.get(name, ()))
    assert answer.code == 2, answer
    assert "other data" in answer.errors
    assert "--data-dir" in answer.errors
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("recorded", [True, False])
def test_the_same_data_elsewhere_is_taken(trained: Path, tmp_path: Path, recorded: bool) -> None:
    """Old runs have no record; their classes are known."""
    run = shutil.copytree(trained, tmp_path / "run")
    data = write_images(tmp_path / "data", ("cat", "dog"))
    if not recorded:
        (run / "data.json").unlink()
    place = ("--data-dir", data, "--trust", "--device", "cpu", "--widths", "0.5,1.0")
    assert command("spectrum", run, *place, "--no-latency").code == 0
    if not recorded:
        place = ("--data-dir", other_names(tmp_path / "other"), *place[2:])
        assert "bee" in command("spectrum", run, *place).errors


def test_a_search_judges_by_the_pictures_of_the_training(tmp_path: Path) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (120, 100)).save(tmp_path / name / f"{name}-{number}.png")
    run = upscaler_run(tmp_path / "run", nonuniform=True, data_dir=str(tmp_path / "own"))
    (run / "data.json").write_text(json.dumps(load_pairs(tmp_path / "own").facts()))
    other = ("--data-dir", tmp_path / "other", "--macs", "20M", "--device", "cpu")
    assert_refused(command("search", run, *other), "other data")
