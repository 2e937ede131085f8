"""The example of a language model: it learns at every width, writes, and goes on where it ended."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import language_model
import python_text

TINY = ("--hidden", "32", "--heads", "4", "--layers", "2", "--length", "32", "--batch", "8",
        "--evaluated", "2", "--text", "200000")  # fmt: skip


def run(*options: str) -> None:
    language_model.main([*TINY, *options])


def perplexities(printed: str) -> dict[tuple[str, float], float]:
    found = re.findall(r"^(\w+) +([\d.]+) +[\d,]+ +([\d.]+)$", printed, re.M)
    return {(name, float(width)): float(value) for name, width, value in found}


def test_every_width_learns_and_two_write(capsys: pytest.CaptureFixture[str]) -> None:
    run("--steps", "40", "--rate", "0.01")
    printed = capsys.readouterr().out
    found = perplexities(printed)
    assert [width for _, width in found] == list(language_model.WIDTHS)
    assert max(found.values()) < 60, "nothing was learned: by chance it is 256"
    for width in (0.25, 1.0):
        assert re.search(rf"width {width} writes:\nimport os", printed)


def test_the_mlp_alone_narrows(capsys: pytest.CaptureFixture[str]) -> None:
    run("--steps", "1", "--narrow", "mlp", "--layers", "1")
    parameters = re.findall(r"slimmable +[\d.]+ +([\d,]+)", capsys.readouterr().out)
    whole = int(parameters[-1].replace(",", ""))
    # Three matrices of 88 by 32, of which 24 rows stay.
    assert int(parameters[0].replace(",", "")) == whole - 3 * 32 * (88 - 24)


def test_a_run_that_was_ended_goes_on_to_the_same_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--large", "--steps", "6", "--save-every", "2", "--alone", "0.5", "--layers", "1",
               "--alone-rates", "0.002")  # fmt: skip
    run(*options, "--folder", str(tmp_path / "whole"))
    batch = python_text.Rows.batch

    def ended(self: Any, number: int, *rest: Any) -> Any:
        if number == 5:
            raise KeyboardInterrupt
        return batch(self, number, *rest)

    monkeypatch.setattr(python_text.Rows, "batch", ended)
    with pytest.raises(KeyboardInterrupt):
        run(*options, "--folder", str(tmp_path / "ended"))
    assert not (tmp_path / "ended" / "perplexities.json").exists()
    monkeypatch.undo()
    run(*options, "--folder", str(tmp_path / "ended"))

    files = {"slimmable.pt", "alone at 0.5.pt", "slimmable.csv", "alone.csv", "spectrum.png"}
    assert {path.name for path in (tmp_path / "ended").iterdir()} == {*files, "perplexities.json"}
    for name in ("slimmable.pt", "alone at 0.5.pt"):
        one, other = (
            torch.load(tmp_path / folder / name, weights_only=True)["model"]
            for folder in ("whole", "ended")
        )
        assert all(torch.equal(one[key], other[key]) for key in one)
    found = json.loads((tmp_path / "ended" / "perplexities.json").read_text())
    assert [(one["kind"], len(one["points"])) for one in found] == [("us", 5), ("i", 1)]
    slimmable, alone = found
    assert alone["points"][0]["width"] == 0.5
    assert alone["points"][0]["parameters"] == slimmable["points"][2]["parameters"]

    with pytest.raises(SystemExit, match="rate"):
        run(*options, "--folder", str(tmp_path / "ended"), "--rate", "0.5")


def test_rows_end_with_their_files() -> None:
    rows = python_text.Rows([b"abcde", b"fg"], length=4)
    tokens, targets = rows.at(torch.tensor([0, 3, 6]))
    assert [bytes(row.tolist()) for row in tokens] == [b"abcd", b"de\0\0", b"fg\0\0"]
    ignored = python_text.IGNORED
    assert targets.tolist() == [[97, 98, 99, 100], [100, 101, 0, ignored], [102, 103, 0, ignored]]


def test_files_are_held_out_whole() -> None:
    train, test = python_text.python_files(2_000_000)
    assert len(train) > 5 * len(test) > 0
    assert not set(train) & set(test) - {b""}
    again = python_text.python_files(2_000_000)
    assert again == (train, test)


def test_files_of_the_final_evaluation_are_not_tuned_on() -> None:
    train, test = python_text.python_files(2_000_000)
    tuning, judging = python_text.python_files(2_000_000, for_tuning=True)
    assert judging
    assert not {*tuning, *judging} & set(test) - {b""}
    assert not set(tuning) & set(judging) - {b""}
    assert {*tuning, *judging} == set(train)
