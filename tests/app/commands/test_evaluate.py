"""`anywidth calibrate` and `spectrum` on real, tiny runs; and what they say to mistakes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from command_line import TINY_RUN, assert_refused, command, csv_rows, start, succeed
from PIL import Image

import anywidth as aw
from anywidth.app.runs.folder_lock import lock_folder
from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.app.tasks.registry import open_trained

pytestmark = pytest.mark.usefixtures("images_unpacked_once")


def test_calibrate_adds_widths_to_the_run(bare: Path) -> None:
    assert aw.calibrated_widths(open_trained(bare, "cpu", with_data=False, trust=True).model) == [
        0.25,
        1.0,
    ]
    answer = succeed("calibrate", bare, "--trust", "--widths", "0.5,0.75", "--samples", "100")
    assert "0.5, 0.75" in answer.output
    assert "2/2" in answer.errors
    trained = open_trained(bare, "cpu", with_data=False, trust=True)
    assert aw.calibrated_widths(trained.model) == [0.25, 0.5, 0.75, 1.0]


def test_the_spectrum_holds_what_evaluation_gives(us_net: Path) -> None:
    succeed("spectrum", us_net, "--trust", "--widths", "0.25:1.0:0.25", "--no-latency")
    trained = open_trained(us_net, "cpu", trust=True)
    found = csv_rows(us_net / "spectrum.csv")
    assert [float(row["width"]) for row in found] == [0.25, 0.5, 0.75, 1.0]
    for row in found:
        with aw.at_width(trained.model, float(row["width"])):
            errors = trained.evaluate(trained.model)
        assert float(row["top1_error"]) == pytest.approx(errors["top1_error"], abs=0.051)
        expected = aw.macs(aw.plan_of(trained.model), float(row["width"]))
        assert int(row["macs"]) == expected


def test_a_spectrum_of_every_width_leaves_no_choice_of_channels_out(
    us_net: Path, i_net: Path
) -> None:
    plan = aw.plan_of(open_trained(us_net, "cpu", with_data=False, trust=True).model)
    succeed("spectrum", us_net, "--trust", "--widths", "every", "--no-latency")
    found = [float(row["width"]) for row in csv_rows(us_net / "spectrum.csv")]
    assert [plan.resolve(width) for width in found] == plan.lattice()
    succeed("spectrum", i_net, "--trust", "--widths", "every", "--no-latency")
    assert [row["width"] for row in csv_rows(i_net / "spectrum.csv")] == ["0.5"]


def test_a_spectrum_is_of_exact_statistics_throughout(bare: Path) -> None:
    moving = open_trained(bare, "cpu", with_data=False, trust=True).model
    succeed(
        "spectrum", bare, "--trust", "--widths", "0.25,0.5,1.0", "--no-latency", "--device", "cpu"
    )
    exact = open_trained(bare, "cpu", with_data=False, trust=True).model
    for width in (0.25, 1.0):
        means = []
        for model in (moving, exact):
            with aw.at_width(model, width):
                norms = (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d))
                means.append(next(norms).running_mean.clone())
        assert not torch.equal(*means), f"width {width} kept its moving averages"


def test_a_narrower_spectrum_says_what_it_replaces(bare: Path) -> None:
    first, less, again, more = (
        succeed(
            "spectrum", bare, "--trust", "--widths", widths, "--no-latency", "--device", "cpu"
        ).output
        for widths in ("0.25,0.5,1.0", "0.5", "0.5", "0.5,1.0")
    )
    assert "earlier" in less
    for output in (first, again, more):
        assert "earlier" not in output
    (bare / "spectrum.json").write_text("damaged")
    succeed("spectrum", bare, "--trust", "--widths", "1.0", "--no-latency", "--device", "cpu")
    assert "overwritten" in " ".join(succeed("spectrum", "--help").output.split())


def test_the_control_is_an_individual_network_of_full_width(tmp_path: Path) -> None:
    run = tmp_path / "control"
    options = ("--method=i", "--epochs", "1", "--no-report", "--out", run)
    succeed("train", *TINY_RUN, *options)
    succeed("spectrum", run, "--trust", "--widths", "0.5,1.0", "--no-latency", "--device", "cpu")
    assert [row["width"] for row in csv_rows(run / "spectrum.csv")] == ["0.5", "1.0"]


def test_data_may_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, data = tmp_path / "moved", tmp_path / "begun" / "data"
    for split, label in itertools.product(("train", "val"), ("cat", "dog")):
        (data / split / label).mkdir(parents=True)
        for number in range(4):
            color = (60 * number, 90 if label == "cat" else 200, 30)
            Image.new("RGB", (40, 40), color).save(data / split / label / f"{number}.png")
    monkeypatch.chdir(tmp_path / "begun")
    options = ("--data", "folder", "--data-dir", "data", "--image-size", "28", "--workers", "0")
    network = ("--model", "tiny_networks:tiny_rgb", "--total-stride", "none", "--divisor", "4")
    steps = ("--epochs", "1", "--batch-size", "4", "--device", "cpu")
    succeed("train", *options, *network, *steps, "--no-report", "--out", run)
    assert Run.open(run).settings_data["data_dir"] == str(data)
    monkeypatch.chdir(tmp_path)
    succeed("calibrate", run, "--trust", "--widths", "0.5", "--device", "cpu")
    data.rename(tmp_path / "elsewhere")
    assert_refused(
        command("calibrate", run, "--trust", "--widths", "0.75", "--device", "cpu"), str(data)
    )
    now = ("--data-dir", "elsewhere", "--device", "cpu")
    succeed("calibrate", run, "--trust", "--widths", "0.75", *now)
    succeed("spectrum", run, "--trust", "--widths", "0.5,0.75", "--no-latency", *now)
    assert len(csv_rows(run / "spectrum.csv")) == 2


def test_paths_are_printed_whole_in_narrow_terminals(
    us_net: Path, s_net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    odd = us_net.rename(tmp_path / "a [bold] name of some length, as folders have them")
    lines = f"Written: {odd / 'spectrum.csv'} and plots in {odd / 'plots'}\n"
    options = ("--widths", "0.25,1.0", "--no-latency", "--device", "cpu")
    assert lines in succeed("spectrum", odd, "--trust", *options).output
    assert (
        succeed("report", odd, "--trust", "--device", "cpu").output
        == f"Report: {odd / 'report.html'}\n"
    )
    plot = odd / "both.svg"
    assert f"Written: {plot}\n" in succeed("compare", odd, s_net, "--out", plot).output


@pytest.mark.parametrize("name", ["calibrate", "spectrum", "report"])
def test_a_folder_that_is_no_run_is_named(name: str, tmp_path: Path) -> None:
    assert_refused(command(name, tmp_path), str(tmp_path), "config.json")
    assert_refused(command(name, tmp_path / "gone"), "gone")


@pytest.mark.parametrize("name", ["calibrate", "spectrum", "report"])
def test_an_unfinished_run_is_to_be_resumed(name: str, tmp_path: Path) -> None:
    Run.create(tmp_path / "run", ClassificationSettings())
    answer = command(name, tmp_path / "run")
    assert_refused(answer, f"anywidth train --resume {tmp_path / 'run'}")


@pytest.mark.parametrize("name", ["calibrate", "spectrum", "report"])
def test_a_run_that_cannot_be_written_to_is_refused_before_the_work(
    name: str, us_net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.setattr("anywidth.app.tasks.registry.open_trained", pytest.fail)
    assert_refused(command(name, us_net), str(us_net), "written")


def test_wrong_widths_are_named(us_net: Path) -> None:
    assert_refused(command("calibrate", us_net, "--trust", "--widths", "0.1"), "0.1", "--low")
    assert_refused(command("spectrum", us_net, "--trust", "--widths", "wide"), "wide", "every")
    assert_refused(command("calibrate", us_net, "--trust", "--samples", "1"), "samples")
    assert_refused(command("calibrate", us_net, "--trust", "--method", "mean"), "'mean'", "exact")


def test_only_what_a_run_reads_may_move(us_net: Path) -> None:
    assert_refused(command("spectrum", us_net, "--trust", "--eval-dir", "/here"), "--eval-dir")
    assert_refused(command("spectrum", us_net, "--trust", "--data-dir", "/here"), "bundled")


def test_two_calibrations_at_once_keep_the_results_of_both(bare: Path) -> None:
    options = ("--trust", "--samples", "50", "--device", "cpu")
    lock = lock_folder(bare)
    other = start("calibrate", bare, "--widths", "0.75", *options)
    assert other.stdout is not None
    assert "Waiting" in other.stdout.readline()
    succeed("calibrate", bare, "--widths", "0.5", *options)
    del lock
    errors = other.communicate()[1]  # its progress too
    assert other.returncode == 0, errors
    model = open_trained(bare, "cpu", with_data=False, trust=True).model
    assert {0.5, 0.75} <= set(aw.calibrated_widths(model))
