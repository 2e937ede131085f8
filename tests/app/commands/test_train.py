"""`anywidth train` on a real, tiny run; and what it says to mistakes."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from command_line import TINY_RUN, assert_one_line, assert_refused, command, csv_rows, succeed

from anywidth.app.runs.run import Run
from anywidth.app.tasks.registry import all_recipes

pytestmark = pytest.mark.usefixtures("images_unpacked_once")


def test_train_ends_with_a_spectrum_and_a_report(us_net: Path) -> None:
    found = csv_rows(us_net / "spectrum.csv")
    assert [float(row["width"]) for row in found] == pytest.approx(
        [0.25 + 0.025 * i for i in range(31)]
    )
    for name in ("report.html", "plots/spectrum.png", "plots/spectrum.svg", "plots/training.png"):
        assert (us_net / name).stat().st_size > 1000, name


def test_a_finished_run_is_not_trained_again(i_net: Path) -> None:
    before = (i_net / "model.safetensors").read_bytes()
    answer = succeed("train", "--resume", i_net, "--trust", "--no-report")
    assert "finished" in answer.output
    assert (i_net / "model.safetensors").read_bytes() == before


def test_a_list_of_recipes_keeps_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = succeed("train", "--list").output.splitlines()
    assert all(len(line) <= 80 for line in lines)
    begun = [line for line in lines if not line.startswith(" ")]
    assert [line.split()[0] for line in begun] == list(all_recipes())


def test_show_and_list_start_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = succeed("train", "cifar10_mobilenet_v1", "--epochs", "7", "--show")
    assert re.search(r"--epochs\s+7\s", shown.output)
    assert "--learning-rate" in shown.output
    listed = succeed("train", "--list")
    assert "fashion_mnist_demo" in listed.output
    assert "imagenet_us_mobilenet_v2" in listed.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fashion_demo",), ("'fashion_demo'", "fashion_mnist_demo")),
        (("--learning-rat", "0.1"), ("--learning-rat ", "--learning-rate")),
        (("--learning-rate", "fast"), ("'fast'",)),
        (("--data", "nowhere"), ("'nowhere'", "bundled")),
        (("--model", "mobilenet_v9"), ("'mobilenet_v9'", "mobilenet_v1")),
        (("--batch-size", "100000"), ("100000",)),
        (("--limit", "1"), ("--batch-size 1",)),
        (("--distill", "maybe"), ("'maybe'",)),
        (("--switches", "0.5,abc"), ("'0.5,abc'",)),
        (("--device", "tpu"), ("'tpu'", "cpu")),
        (("--low", "2"), ("low",)),
        (("--rule", "biggest"), ("'biggest'", "sandwich")),
        (("demo", "twice"), ("'twice'",)),
        (("--epochs", "0"), ("epochs",)),
        (("--log-every", "0"), ("--log-every 0",)),
        (("--validate-every", "0"), ("--validate-every 0",)),
        (("--checkpoint-every", "0"), ("--checkpoint-every 0",)),
        (("--data-dir", "/here"), ("--data-dir /here", "--data ")),
        (("--eval-dir", "/here"), ("--eval-dir", "classification", "--show")),
    ],
)
def test_train_names_what_is_wrong(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    answer = command("train", *arguments, "--out", tmp_path / "run", "--no-report")
    assert_refused(answer, *words)
    assert not (tmp_path / "run").exists()


def test_an_existing_folder_is_not_written_over(i_net: Path) -> None:
    before = (i_net / "config.json").read_bytes()
    assert_refused(command("train", *TINY_RUN, "--out", i_net), str(i_net), "--resume", "--out")
    assert (i_net / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    "options",
    [("--epochs", "3"), ("--seed", "1"), ("--learning-rate", "1"), ("--out", "elsewhere"),
     ("cifar10_mobilenet_v1",)],
)  # fmt: skip
def test_resume_takes_no_other_options(i_net: Path, options: tuple[str, ...]) -> None:
    answer = command("train", *options, "--resume", i_net, "--no-report")
    assert_refused(answer, "--resume")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    answer = command("train", *TINY_RUN, "--out", tmp_path / "file" / "run")
    assert_refused(answer, str(tmp_path / "file"), "--out")


def test_what_the_system_refuses_is_one_line_and_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> Run:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "run"))

    monkeypatch.setattr(Run, "create", refuse)
    answer = command("train", *TINY_RUN, "--out", tmp_path / "run")
    assert answer.code == 1
    assert_one_line(answer, "denied", str(tmp_path / "run"))
