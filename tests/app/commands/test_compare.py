"""`anywidth compare` and `report`: several runs in one plot and on one page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from command_line import TINY_RUN, assert_refused, command, csv_rows, succeed

from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings

pytestmark = pytest.mark.usefixtures("images_unpacked_once")


def test_compare_puts_all_kinds_in_one_plot(
    us_net: Path, s_net: Path, i_net: Path, tmp_path: Path
) -> None:
    succeed("spectrum", i_net, "--trust")
    plot = tmp_path / "comparison.svg"
    answer = succeed("compare", us_net, s_net, i_net, "--out", plot)
    for name in ("US-tiny", "S-tiny", "I-tiny"):
        assert name in answer.output
    assert "<svg" in plot.read_text()
    assert len(csv_rows(s_net / "spectrum.csv")) == 3
    assert len(csv_rows(i_net / "spectrum.csv")) == 1


def test_a_baseline_of_another_recipe_is_told_apart(us_net: Path, tmp_path: Path) -> None:
    baseline = tmp_path / "other-rate"
    options = ("--epochs", "1", "--learning-rate", "0.01", "--no-report", "--out", baseline)
    succeed("train", *TINY_RUN, *options)
    succeed("spectrum", baseline, "--trust", "--widths", "0.25,1.0", "--no-latency")
    succeed("report", us_net, "--trust", "--baseline", baseline)
    page = (us_net / "report.html").read_text()
    assert "US-tiny (us)" in page
    assert "US-tiny (other-rate)" in page


def test_report_is_one_page_with_its_baselines(us_net: Path, s_net: Path) -> None:
    succeed("report", us_net, "--trust", "--baseline", s_net)
    page = (us_net / "report.html").read_text()
    assert "US-tiny" in page
    assert "S-tiny" in page
    assert not re.search(r'(src|href)="(https?:|/)', page)


def test_the_report_of_an_individual_network_has_one_curve_and_its_width(i_net: Path) -> None:
    columns = (i_net / "metrics.csv").read_text().splitlines()[0].split(",")
    assert "loss_max" in columns
    assert not [name for name in columns if name.endswith("_min")]
    succeed("spectrum", i_net, "--trust", "--no-latency", "--device", "cpu")
    succeed("report", i_net, "--trust", "--device", "cpu")
    page = (i_net / "report.html").read_text()
    assert "widest" not in page
    assert "narrowest" not in page
    assert re.search(r"width  multiply-adds\n0\.5    [\d,]+</pre>", page)


def test_compare_needs_two_runs_with_a_spectrum(us_net: Path, tmp_path: Path) -> None:
    assert_refused(command("compare", us_net), "two")
    bare = tmp_path / "bare"
    Run.create(bare, ClassificationSettings())
    assert_refused(command("compare", us_net, bare), f"anywidth spectrum {bare}")


def test_compare_takes_whole_runs_of_one_task_alone(us_net: Path, tmp_path: Path) -> None:
    other = tmp_path / "game"
    Run.create(other, ReinforcementSettings())
    shutil.copy(us_net / "spectrum.json", other)
    for arguments in (("compare", us_net, other), ("report", us_net, "--baseline", other)):
        answer = command(*arguments)
        assert_refused(answer, str(us_net), str(other), "reinforcement")
    (other / "config.json").write_text("{}")
    answer = command("compare", us_net, other)
    assert_refused(answer, str(other / "config.json"), "task")


def test_compare_names_a_folder_that_is_missing(us_net: Path, s_net: Path, tmp_path: Path) -> None:
    out = tmp_path / "nofolder" / "x.png"
    answer = command("compare", us_net, s_net, "--out", out)
    assert_refused(answer, "--out", str(out.parent))
    assert answer.output == ""
