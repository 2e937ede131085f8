"""The command `study`: its options, one stopped by the clock, and one end to end through kills."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import HANGS_AFTER, anywidth, command, start, wait_for_step
from tiny_study import SETTINGS, STUDY

from anywidth.app.runs.metrics import read_metrics
from anywidth.app.studies.definitions import STUDIES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["main"]),
        (("mane",), ["'mane'", "naturally-slimmable"]),
        (("main", "--data", "cifar10"), ["--data-dir"]),
        (("main", "--data", "cifar10", "--data-dir", "/nope"), ["/nope"]),
        (("main", "--data", "mnist"), ["'mnist'", "cifar10"]),
        (("main", "--seeds", "0"), ["--seeds"]),
        (("main", "--parallel", "0"), ["--parallel"]),
        (("main", "--minutes", "0"), ["--minutes"]),
        (("main", "--set", "epochs"), ["'epochs'", "FIELD=VALUE"]),
        (("main", "--set", "epoch=3"), ["'epoch'", "epochs"]),
        (("main", "--set", "method=i"), ["method=i"]),
        (("main", "--set", "seed=4"), ["seed=4", "--seeds"]),
        (("main", "--set", "low=0.5"), ["low=0.5"]),
        (("drawn-widths", "--set", "lattice=3"), ["drawn-widths", "lattice"]),
        (
            ("main", "number-of-widths", "--set", "widths-per-step=6"),
            ["number-of-widths", "widths_per_step"],
        ),
        (("main", "--only", "resnet"), ["'resnet'", "mobilenet_v1-us-seed-0"]),
        (("main", "--epochs", "0"), ["epochs"]),
        (("main", "--set", "label_smoothing=1"), ["label-smoothing"]),
        (("super-resolution", "--data", "cifar10"), ["super-resolution", "pictures"]),
        (("super-resolution", "--data", "pictures"), ["--data-dir"]),
        (("reinforcement", "--epochs", "3"), ["steps"]),
        (("main", "reinforcement", "--set", "rollouts=3"), ["rollouts"]),
        (("main", "super-resolution", "--set", "distill=l1"), ["distill"]),
    ],
)
def test_wrong_options_are_named(
    arguments: tuple[str, ...], words: list[str], tmp_path: Path
) -> None:
    answer = command("study", *arguments, "--out", tmp_path / "out")
    assert answer.code == 2
    for word in words:
        assert word in answer.errors
    assert not (tmp_path / "out").exists()  # nothing was begun


@pytest.mark.parametrize("name", ["main", "super-resolution"])
def test_a_file_is_no_folder_of_results(name: str, tmp_path: Path) -> None:
    (tmp_path / "shirt.png").write_bytes(b"")
    answer = command("study", name, "--out", tmp_path / "shirt.png", "--parallel", "2")
    assert answer.code == 2
    (line,) = answer.errors.splitlines()
    assert str(tmp_path / "shirt.png") in line
    assert answer.output == ""


def test_the_list_names_every_study() -> None:
    answer = command("study", "--list")
    assert answer.code == 0
    for study in STUDIES:
        assert study.name in answer.output


def test_time_given_ends_cleanly(tmp_path: Path) -> None:
    options = ["--out", tmp_path, *SETTINGS, "--epochs", "1", "--device", "cpu"]
    answer = command("study", "output-averaging", *options, "--parallel", "1", "--minutes", "0.001")
    assert answer.code == 130
    assert "0 of 2" in answer.output
    assert "anywidth study output-averaging" in answer.output
    assert not (tmp_path / "output-averaging.md").exists()


def test_a_part_of_a_study_says_how_its_trainings_ended(tmp_path: Path) -> None:
    options = ["--out", tmp_path, *SETTINGS, "--epochs", "1", "--device", "cpu", "--parallel", "1"]
    answer = command("study", "output-averaging", *options, "--only", "average_outputs-")
    assert answer.code == 0, answer.errors
    assert "mobilenet_v1-us-seed-0" in answer.output
    (folder,) = (tmp_path / "runs").iterdir()
    last = read_metrics(folder / "metrics.csv")[-1]
    wide, narrow = last["validation_error_max"], last["validation_error_min"]
    line = [line for line in answer.output.splitlines() if folder.name in line][-1]
    assert f"validation error max {wide:.2f}" in line
    assert f"validation error min {narrow:.2f}" in line


def tables_of(page: Path) -> str:
    found = re.search(r"## MobileNet.*## Figures", page.read_text(), re.DOTALL)
    assert found
    return found[0]


def test_a_study_survives_kills(tmp_path: Path) -> None:
    """Stopped, then killed, then resumed in processes, it ends in the same table bit for bit."""
    arguments = ["study", "distillation", "--epochs", "1", "--device", "cpu", *SETTINGS, "--out"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = anywidth(*arguments, whole, "--parallel", "1", PAUSE="0")
    assert done.returncode == 0, done.stderr
    names = [one.name for one in STUDY["distillation"].trainings]
    first, second, third = (broken / "runs" / f"{name}-seed-0" for name in names)

    # Ten steps of four widths: on a busy machine one process may begin seconds after the other.
    process = start(*arguments, broken, "--parallel", "2", PAUSE="0.3")
    for folder in (first, second):
        wait_for_step(process, folder / "metrics.csv", 2)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 143, errors
    assert "0 of 3" in output
    assert "anywidth study distillation" in output
    for folder in (first, second):
        assert list((folder / "checkpoints").iterdir())
        assert json.loads((folder / "pieces.json").read_text())["pieces"][0]["steps"] >= 2
    assert not third.exists()

    process = start(*arguments, broken, "--parallel", "1", PAUSE="0.03")
    steps = json.loads((second / "pieces.json").read_text())["pieces"][0]["steps"]
    wait_for_finish(process, first / "measurements" / "calibrated.json")
    wait_for_step(process, second / "metrics.csv", steps)
    process.kill()
    process.communicate()
    kept = {path: path.stat().st_mtime_ns for path in files_of(first)}

    done = anywidth(*arguments, broken, "--parallel", "2", PAUSE="0")
    assert done.returncode == 0, done.stderr
    assert "3 trainings, 1 " in done.stdout
    assert {path: path.stat().st_mtime_ns for path in files_of(first)} == kept
    for name in ("distillation.csv", "distillation.png", "distillation.svg"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name
    assert tables_of(broken / "distillation.md") == tables_of(whole / "distillation.md")
    lines = (whole / "distillation.csv").read_text().splitlines()
    assert len(list(csv.DictReader(lines))) == 3 * 31


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def wait_for_finish(process: Any, path: Path) -> None:
    deadline = time.monotonic() + HANGS_AFTER
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, os.listdir(path.parents[1])
        time.sleep(0.002)
