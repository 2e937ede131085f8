"""`anywidth predict`: classes of a picture at a width that was calibrated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from command_line import Answer, assert_refused, command, csv_rows, succeed
from finished_runs import trained_otherwise
from PIL import Image

import anywidth as aw
from anywidth.app.runs.run import Run
from anywidth.app.tasks.chosen_width import calibrated
from anywidth.app.tasks.registry import open_trained
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings

pytestmark = pytest.mark.usefixtures("images_unpacked_once")


@pytest.fixture
def grey(tmp_path: Path) -> Path:
    Image.new("L", (28, 28), 100).save(tmp_path / "grey.png")
    return tmp_path / "grey.png"


def test_predict_prints_likely_classes(us_net: Path, tmp_path: Path) -> None:
    picture = tmp_path / "shirt.png"
    pixels = torch.randint(256, (40, 30), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(picture)
    answers = [
        succeed(
            "predict", us_net, "--trust", picture, "--width", width, "--top", "3", "--device", "cpu"
        )
        for width in (0.25, 1.0)
    ]
    classes = set(Run.open(us_net).state()["classes"])
    for answer in answers:
        lines = re.findall(r"^\s*([\d.]+) %  (.+)$", answer.output, re.MULTILINE)
        shares = [float(share) for share, _ in lines]
        assert len(lines) == 3
        assert shares == sorted(shares, reverse=True)
        assert {name for _, name in lines} <= classes
    assert answers[0].output != answers[1].output


def test_an_individual_network_goes_by_its_one_width(i_net: Path, tmp_path: Path) -> None:
    picture = tmp_path / "grey.png"
    Image.new("L", (28, 28), 100).save(picture)
    for given in ((), ("--widths", "0.5")):
        answer = succeed("calibrate", i_net, "--trust", *given, "--device", "cpu")
        assert "0.5" in answer.output
        assert bool(given) <= (f"anywidth spectrum {i_net}" in answer.output)
        answer = succeed("spectrum", i_net, "--trust", *given, "--no-latency", "--device", "cpu")
        assert re.search(r"^ *0\.5 ", answer.output, re.MULTILINE)
        assert [row["width"] for row in csv_rows(i_net / "spectrum.csv")] == ["0.5"]
    own, same = (
        succeed("predict", i_net, "--trust", picture, *given, "--device", "cpu")
        for given in ((), ("--width", "0.5"))
    )
    assert own.output == same.output
    for width in ("0.25", "1.0", "0.5,1.0"):
        for name in ("calibrate", "spectrum"):
            answer = command(name, i_net, "--trust", "--widths", width, "--device", "cpu")
            assert_refused(answer, "0.5")
    for width in ("0.25", "1.0"):
        answer = command("predict", i_net, "--trust", picture, "--width", width, "--device", "cpu")
        assert_refused(answer, "0.5")


def test_predict_names_what_is_wrong(us_net: Path, tmp_path: Path) -> None:
    assert_refused(command("predict", us_net, "--trust", tmp_path / "no.png"), "no.png")
    text = tmp_path / "text.png"
    text.write_text("not a picture")
    assert_refused(command("predict", us_net, "--trust", text), "text.png")
    assert_refused(command("predict", us_net, "--trust", text, "--width", "1.5"), "1.5")
    assert_refused(command("predict", us_net, "--trust", text, "--top", "0"), "--top")


@pytest.mark.parametrize("name", ["predict", "upscale"])
def test_a_run_of_another_task_is_named_with_its_own_command(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    Run.create(run, ReinforcementSettings())
    answer = command(name, run, tmp_path / "picture.png")
    assert_refused(answer, "reinforcement", f"anywidth play {run}")


def test_an_uncalibrated_width_is_calibrated_on_the_spot(bare: Path, grey: Path) -> None:
    first, second = (
        succeed("predict", bare, "--trust", grey, "--width", "0.5", "--device", "cpu")
        for _ in range(2)
    )
    assert "Width 0.5 has no batch-norm statistics" in first.errors
    assert first.output == second.output
    assert second.errors == ""


def test_without_its_data_an_uncalibrated_width_says_what_to_do(bare: Path, grey: Path) -> None:
    trained_otherwise(bare, data="cifar10", data_dir=str(bare / "moved"))
    answer = command("predict", bare, "--trust", grey, "--width", "0.5", "--device", "cpu")
    assert_refused(answer, "moved", f"anywidth calibrate {bare} --widths 0.5")


def test_a_read_only_run_is_calibrated_for_now(bare: Path, grey: Path) -> None:
    class Full(OSError):
        pass

    trained = open_trained(bare, "cpu", with_data=False, trust=True)
    with (
        mock.patch.object(Run, "save_statistics", side_effect=Full),
        mock.patch("os.access", return_value=False),
    ):
        found = calibrated(trained, [0.5])
    assert found.uncalibrated([0.5]) == []


# ---- several images ------------------------------------------------------------------------------


def test_several_images_and_folders(us_net: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    (folder / "inner").mkdir(parents=True)
    for name in ("b.png", "a.JPG", "inner/c.png"):
        Image.new("L", (28, 28), 100).save(folder / name, "png")
    (folder / "notes.txt").write_text("no picture")
    (folder / "thumbnails.png").mkdir()
    asked = (us_net, "--trust", "--device", "cpu", "--top", "2")
    lines = succeed("predict", *asked, folder / "b.png", folder).output.splitlines()
    named = [str(folder / name) for name in ("b.png", "a.JPG", "b.png", "inner/c.png")]
    assert lines[::3] == named
    answer = succeed("predict", *asked, folder / "b.png", folder, "--width", "0.5", "--json")
    found = json.loads(answer.output)
    assert [one["image"] for one in found] == named
    assert all(one["width"] == 0.5 and len(one["classes"]) == 2 for one in found)
    assert all(0 < kind["probability"] <= 1 for one in found for kind in one["classes"])
    assert_refused(command("predict", *asked, us_net / "checkpoints"), "checkpoints")


def test_one_bad_image_does_not_cost_the_others(us_net: Path, grey: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_text("not a picture")
    answer = command("predict", us_net, "--trust", bad, grey, "--device", "cpu", "--json")
    assert_refused(answer, "1 of 2", "bad.png")
    first, second = json.loads(answer.output)
    assert "bad.png" in first["error"]
    assert len(second["classes"]) == 5


# ---- budgets -------------------------------------------------------------------------------------


def width_of(answer: Answer) -> float:
    (width,) = {one["width"] for one in json.loads(answer.output)}
    return float(width)


def test_the_widest_width_within_a_budget(us_net: Path, grey: Path) -> None:
    asked = ("predict", us_net, "--trust", grey, "--device", "cpu", "--json")
    model = open_trained(us_net, "cpu", with_data=False, trust=True).model
    costs = {width: aw.macs(model, width) for width in aw.plan_of(model).distinct_widths()}
    for most in (min(costs.values()), 50_000, max(costs.values()) + 1):
        fits = max(width for width, cost in costs.items() if cost <= most)
        assert width_of(succeed(*asked, "--max-macs", most)) == fits
    count = aw.parameter_count(model, 0.5)
    chosen = width_of(succeed(*asked, "--max-parameters", count))
    assert aw.parameter_count(model, chosen) == count
    both = succeed(*asked, "--max-macs", "1G", "--max-parameters", count)
    assert width_of(both) == chosen
    narrowest = f"{min(costs.values()) / 1e3:.4g}k"
    assert_refused(command(*asked, "--max-macs", 10), "--max-macs", narrowest)
    assert_refused(command(*asked, "--max-macs", "1G", "--width", "0.5"), "--max-macs", "--width")
    assert_refused(command(*asked, "--budget", "2"), "--budget", "5ms")


def test_a_budget_of_time_reads_the_spectrum_or_measures(us_net: Path, grey: Path) -> None:
    asked = ("predict", us_net, "--trust", grey, "--device", "cpu", "--json")
    path = us_net / "spectrum.json"
    spectrum = json.loads(path.read_text())
    for number, point in enumerate(spectrum["points"], 1):
        point["latency_ms"] = float(number)
    path.write_text(json.dumps(spectrum))
    fits = spectrum["points"][2]["width"]
    assert width_of(succeed(*asked, "--budget", "3.5ms")) == fits
    assert_refused(command(*asked, "--budget", "100us"), "--budget", "1 ms")
    path.unlink()
    measured = succeed(*asked, "--budget", "100s")
    assert "measuring" in measured.errors
    assert width_of(measured) == 1.0
