"""Whatever a file or a class is called, a terminal shows it and does nothing else."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from command_line import TINY_RUN, assert_refused, command, succeed
from finished_runs import CLASSES, MEAN, STD, classifier_run
from PIL import Image

from anywidth.app.plain_text import in_one_line, visible, write_anything
from anywidth.json_values import checksum_of
from anywidth.measuring.spectra import Spectrum, SpectrumPoint
from anywidth.width import ChannelConfig

HOSTILE = "shirt\x1b]0;retitled\x07\u202e"


def test_control_characters_are_shown() -> None:
    shown = visible(HOSTILE)
    assert shown.isprintable()
    assert shown.startswith("shirt\\x1b]0;retitled")
    assert visible("図 ünï 🙂 a\tb\nc") == "図 ünï 🙂 a\tb\nc"


def test_one_line_keeps_the_spaces_of_a_path() -> None:
    assert in_one_line("'my  runs': no\n  such folder\n") == "'my  runs': no such folder"


def test_a_terminal_of_another_encoding_shows_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    write_anything()
    print("図\udcff")
    sys.stdout.flush()
    assert written.getvalue() == b"\\u56f3\\udcff\n"


def test_the_classes_of_a_received_run_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    run = classifier_run(tmp_path / "run", [1.0])
    finished = json.loads((run / "finished.json").read_text())
    names = [f"{HOSTILE}{number}" for number in range(len(CLASSES))]
    finished["state"] = {"classes": names, "input_shape": [1, 12, 12], "mean": MEAN, "std": STD}
    finished["sha256"] = checksum_of(finished["state"])
    (run / "finished.json").write_text(json.dumps(finished))
    Image.new("L", (12, 12)).save(tmp_path / "picture.png")
    answer = succeed("predict", run, tmp_path / "picture.png", "--trust", "--device", "cpu")
    assert "retitled" in answer.output
    assert "\x1b" not in answer.output


@pytest.mark.parametrize("option", ["--out", "--data-dir"])
def test_a_name_that_is_no_text_is_refused(option: str, tmp_path: Path) -> None:
    folder = tmp_path / "\udcff"
    folder.mkdir()
    data = ("--data", "folder") if option == "--data-dir" else ()
    out = () if option == "--out" else ("--out", tmp_path / "run")
    assert_refused(command("train", *TINY_RUN, *data, *out, option, folder), "UTF-8")


def test_the_name_of_a_received_spectrum_does_nothing_either(tmp_path: Path) -> None:
    metrics = {"top1_error": 1.0, "top5_error": 1.0, "loss": 1.0}
    point = SpectrumPoint(1.0, ChannelConfig((("0", 16),)), 9, 9, metrics)
    for name in ("one", "two"):
        run = classifier_run(tmp_path / name, [1.0])
        found = Spectrum(f"{HOSTILE}{name}", (point,))
        (run / "spectrum.json").write_text(json.dumps(found.to_json()))
    runs = (tmp_path / "one", tmp_path / "two")
    answer = succeed("compare", *runs, "--out", tmp_path / "plot.png")
    assert "retitled" in answer.output
    assert "\x1b]" not in answer.output
