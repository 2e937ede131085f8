"""The `anywidth` command on a real, tiny run; and what it says to mistakes."""

from __future__ import annotations

import csv
import errno
import itertools
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from command_line import TINY_RUN, Answer, anywidth, command, succeed
from PIL import Image
from typer.main import get_command

import anywidth as aw
from anywidth.app.commands.app import app
from anywidth.app.runs.run import Run
from anywidth.app.showing.output import console
from anywidth.app.tasks.classification.task import ClassificationSettings, open_trained
from anywidth.app.tasks.registry import all_recipes
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings

pytestmark = pytest.mark.usefixtures("images_unpacked_once")

COMMANDS = tuple(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def us_net(folder: Path) -> Path:
    succeed("train", *TINY_RUN, "--out", folder / "us")
    return folder / "us"


@pytest.fixture(scope="module")
def s_net(folder: Path) -> Path:
    options = ("--method", "s", "--switches", "0.25,0.5,1.0", "--private-affine")
    succeed("train", *TINY_RUN, *options, "--out", folder / "s")
    return folder / "s"


@pytest.fixture(scope="module")
def i_net(folder: Path) -> Path:
    """Trained, and nothing more."""
    options = ("--method=i", "--width=0.5", "--epochs", "1", "--no-report")
    succeed("train", *TINY_RUN, *options, "--out", folder / "i")
    return folder / "i"


def rows(path: Path) -> list[dict[str, str]]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


# ---- commands that work --------------------------------------------------------------------------


def test_train_ends_with_a_spectrum_and_a_report(us_net: Path) -> None:
    found = rows(us_net / "spectrum.csv")
    assert [float(row["width"]) for row in found] == pytest.approx(
        [0.25 + 0.025 * i for i in range(31)]
    )
    for name in ("report.html", "plots/spectrum.png", "plots/spectrum.svg", "plots/training.png"):
        assert (us_net / name).stat().st_size > 1000, name


def test_calibrate_adds_widths_to_the_run(folder: Path) -> None:
    run = folder / "calibrated"
    succeed("train", *TINY_RUN, "--no-report", "--out", run)
    assert aw.calibrated_widths(open_trained(run, "cpu", with_data=False).model) == [0.25, 1.0]
    answer = succeed("calibrate", run, "--widths", "0.5,0.75", "--samples", "100")
    assert "0.5, 0.75" in answer.output
    assert "2/2" in answer.errors
    trained = open_trained(run, "cpu", with_data=False)
    assert aw.calibrated_widths(trained.model) == [0.25, 0.5, 0.75, 1.0]


def test_the_spectrum_holds_what_evaluation_gives(us_net: Path) -> None:
    succeed("spectrum", us_net, "--widths", "0.25:1.0:0.25", "--no-latency")
    trained = open_trained(us_net, "cpu")
    found = rows(us_net / "spectrum.csv")
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
    plan = aw.plan_of(open_trained(us_net, "cpu", with_data=False).model)
    succeed("spectrum", us_net, "--widths", "every", "--no-latency")
    found = [float(row["width"]) for row in rows(us_net / "spectrum.csv")]
    assert [plan.resolve(width) for width in found] == plan.lattice()
    succeed("spectrum", i_net, "--widths", "every", "--no-latency")
    assert [row["width"] for row in rows(i_net / "spectrum.csv")] == ["0.5"]


def test_compare_puts_all_kinds_in_one_plot(
    us_net: Path, s_net: Path, i_net: Path, tmp_path: Path
) -> None:
    succeed("spectrum", i_net)
    plot = tmp_path / "comparison.svg"
    answer = succeed("compare", us_net, s_net, i_net, "--out", plot)
    for name in ("US-tiny", "S-tiny", "I-tiny"):
        assert name in answer.output
    assert "<svg" in plot.read_text()
    assert len(rows(s_net / "spectrum.csv")) == 3
    assert len(rows(i_net / "spectrum.csv")) == 1


def test_a_baseline_of_another_recipe_is_told_apart(us_net: Path, folder: Path) -> None:
    baseline = folder / "other-rate"
    options = ("--epochs", "1", "--learning-rate", "0.01", "--no-report", "--out", baseline)
    succeed("train", *TINY_RUN, *options)
    succeed("spectrum", baseline, "--widths", "0.25,1.0", "--no-latency")
    succeed("report", us_net, "--baseline", baseline)
    page = (us_net / "report.html").read_text()
    assert "US-tiny (us)" in page
    assert "US-tiny (other-rate)" in page


def test_a_spectrum_is_of_exact_statistics_throughout(folder: Path) -> None:
    run = folder / "throughout"
    succeed("train", *TINY_RUN, "--no-report", "--out", run)
    moving = open_trained(run, "cpu", with_data=False).model
    succeed("spectrum", run, "--widths", "0.25,0.5,1.0", "--no-latency", "--device", "cpu")
    exact = open_trained(run, "cpu", with_data=False).model
    for width in (0.25, 1.0):
        means = []
        for model in (moving, exact):
            with aw.at_width(model, width):
                norms = (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d))
                means.append(next(norms).running_mean.clone())
        assert not torch.equal(*means), f"width {width} kept its moving averages"


def test_data_may_move(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, data = folder / "moved", tmp_path / "begun" / "data"
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
    succeed("calibrate", run, "--widths", "0.5", "--device", "cpu")
    data.rename(tmp_path / "elsewhere")
    assert_refused(command("calibrate", run, "--widths", "0.75", "--device", "cpu"), str(data))
    now = ("--data-dir", "elsewhere", "--device", "cpu")
    succeed("calibrate", run, "--widths", "0.75", *now)
    succeed("spectrum", run, "--widths", "0.5,0.75", "--no-latency", *now)
    assert len(rows(run / "spectrum.csv")) == 2


def test_report_is_one_page_with_its_baselines(us_net: Path, s_net: Path) -> None:
    succeed("report", us_net, "--baseline", s_net)
    page = (us_net / "report.html").read_text()
    assert "US-tiny" in page
    assert "S-tiny" in page
    assert not re.search(r'(src|href)="(https?:|/)', page)


def test_predict_prints_likely_classes(us_net: Path, tmp_path: Path) -> None:
    picture = tmp_path / "shirt.png"
    pixels = torch.randint(256, (40, 30), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(picture)
    answers = [
        succeed("predict", us_net, picture, "--width", width, "--top", "3", "--device", "cpu")
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


def test_a_finished_run_is_not_trained_again(i_net: Path) -> None:
    before = (i_net / "model.safetensors").read_bytes()
    answer = succeed("train", "--resume", i_net, "--no-report")
    assert "finished" in answer.output
    assert (i_net / "model.safetensors").read_bytes() == before


def test_an_individual_network_goes_by_its_one_width(i_net: Path, tmp_path: Path) -> None:
    picture = tmp_path / "grey.png"
    Image.new("L", (28, 28), 100).save(picture)
    for given in ((), ("--widths", "0.5")):
        answer = succeed("calibrate", i_net, *given, "--device", "cpu")
        assert "0.5" in answer.output
        assert bool(given) <= (f"anywidth spectrum {i_net}" in answer.output)
        answer = succeed("spectrum", i_net, *given, "--no-latency", "--device", "cpu")
        assert re.search(r"^ *0\.5 ", answer.output, re.MULTILINE)
        assert [row["width"] for row in rows(i_net / "spectrum.csv")] == ["0.5"]
    own, same = (
        succeed("predict", i_net, picture, *given, "--device", "cpu")
        for given in ((), ("--width", "0.5"))
    )
    assert own.output == same.output
    for width in ("0.25", "1.0", "0.5,1.0"):
        for name in ("calibrate", "spectrum"):
            answer = command(name, i_net, "--widths", width, "--device", "cpu")
            assert_refused(answer, "0.5")
    for width in ("0.25", "1.0"):
        answer = command("predict", i_net, picture, "--width", width, "--device", "cpu")
        assert_refused(answer, "0.5")


def test_the_report_of_an_individual_network_has_one_curve_and_its_width(i_net: Path) -> None:
    columns = (i_net / "metrics.csv").read_text().splitlines()[0].split(",")
    assert "loss_max" in columns
    assert not [name for name in columns if name.endswith("_min")]
    succeed("spectrum", i_net, "--no-latency", "--device", "cpu")
    succeed("report", i_net, "--device", "cpu")
    page = (i_net / "report.html").read_text()
    assert "widest" not in page
    assert "narrowest" not in page
    assert re.search(r"width  multiply-adds\n0\.5    [\d,]+</pre>", page)


def test_the_control_is_an_individual_network_of_full_width(folder: Path) -> None:
    run = folder / "control"
    options = ("--method=i", "--epochs", "1", "--no-report", "--out", run)
    succeed("train", *TINY_RUN, *options)
    succeed("spectrum", run, "--widths", "0.5,1.0", "--no-latency", "--device", "cpu")
    assert [row["width"] for row in rows(run / "spectrum.csv")] == ["0.5", "1.0"]


def test_a_narrower_spectrum_says_what_it_replaces(folder: Path) -> None:
    run = folder / "twice"
    succeed("train", *TINY_RUN, "--epochs", "1", "--no-report", "--out", run)
    first, less, again, more = (
        succeed("spectrum", run, "--widths", widths, "--no-latency", "--device", "cpu").output
        for widths in ("0.25,0.5,1.0", "0.5", "0.5", "0.5,1.0")
    )
    assert "earlier" in less
    for output in (first, again, more):
        assert "earlier" not in output
    (run / "spectrum.json").write_text("damaged")
    succeed("spectrum", run, "--widths", "1.0", "--no-latency", "--device", "cpu")
    assert "written over" in " ".join(succeed("spectrum", "--help").output.split())


def test_paths_are_printed_whole_in_narrow_terminals(
    us_net: Path, s_net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    odd = tmp_path / "a [bold] name of some length, as folders have them"
    shutil.copytree(us_net, odd)
    lines = f"Written: {odd / 'spectrum.csv'} and plots in {odd / 'plots'}\n"
    options = ("--widths", "0.25,1.0", "--no-latency", "--device", "cpu")
    assert lines in succeed("spectrum", odd, *options).output
    assert succeed("report", odd, "--device", "cpu").output == f"Report: {odd / 'report.html'}\n"
    plot = odd / "both.svg"
    assert f"Written: {plot}\n" in succeed("compare", odd, s_net, "--out", plot).output


def test_a_pipe_is_not_taken_for_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console.print("a word " * 16)
    assert len(capsys.readouterr().out.splitlines()) == 1


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


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_itself_with_an_example(name: str) -> None:
    _, heading, examples = succeed(name, "--help").output.partition("Example")
    assert heading
    assert f"anywidth {name}" in examples
    assert name in succeed("--help").output


# ---- mistakes ------------------------------------------------------------------------------------


def assert_one_line(answer: Answer, *words: str) -> None:
    lines = answer.errors.strip().splitlines()
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0]


def assert_refused(answer: Answer, *words: str) -> None:
    assert answer.code == 2, answer
    assert_one_line(answer, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fashion_demo",), ("'fashion_demo'", "fashion_mnist_demo")),
        (("--learning-rat", "0.1"), ("learning-rat", "learning_rate")),
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
        (("--log-every", "0"), ("log_every",)),
        (("--validate-every", "0"), ("validate_every",)),
        (("--checkpoint-every", "0"), ("checkpoint_every",)),
        (("--data-dir", "/here"), ("'/here'", "--data-dir")),
        (("--eval-dir", "/here"), ("eval_dir", "classification")),
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
    monkeypatch.setattr("anywidth.app.commands.evaluate.open_trained", pytest.fail)
    assert_refused(command(name, us_net), str(us_net), "written")


def test_wrong_widths_are_named(us_net: Path) -> None:
    assert_refused(command("calibrate", us_net, "--widths", "0.1"), "0.1", "--low")
    assert_refused(command("spectrum", us_net, "--widths", "wide"), "wide", "every")
    assert_refused(command("calibrate", us_net, "--samples", "1"), "samples")
    assert_refused(command("calibrate", us_net, "--method", "mean"), "'mean'", "exact")


def test_predict_names_what_is_wrong(us_net: Path, tmp_path: Path) -> None:
    assert_refused(command("predict", us_net, tmp_path / "no.png"), "no.png")
    text = tmp_path / "text.png"
    text.write_text("not a picture")
    assert_refused(command("predict", us_net, text), "text.png")
    assert_refused(command("predict", us_net, text, "--width", "1.5"), "1.5")
    assert_refused(command("predict", us_net, text, "--top", "0"), "--top")


@pytest.mark.parametrize("name", ["predict", "upscale"])
def test_a_run_of_another_task_is_named_with_its_own_command(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    Run.create(run, ReinforcementSettings())
    answer = command(name, run, tmp_path / "picture.png")
    assert_refused(answer, "reinforcement", f"anywidth play {run}")


def test_predict_at_an_uncalibrated_width_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    run, picture = folder / "ends", tmp_path / "grey.png"
    succeed("train", *TINY_RUN, "--epochs", "1", "--no-report", "--out", run)
    Image.new("L", (28, 28), 100).save(picture)
    answer = command("predict", run, picture, "--width", "0.5")
    assert_refused(answer, f"anywidth calibrate {run} --widths 0.5")


def test_compare_needs_two_runs_with_a_spectrum(us_net: Path, folder: Path) -> None:
    assert_refused(command("compare", us_net), "two")
    bare = folder / "bare"
    Run.create(bare, ClassificationSettings())
    assert_refused(command("compare", us_net, bare), f"anywidth spectrum {bare}")


def test_compare_takes_whole_runs_of_one_task_alone(us_net: Path, folder: Path) -> None:
    other = folder / "game"
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


def test_only_what_a_run_reads_may_move(us_net: Path) -> None:
    assert_refused(command("spectrum", us_net, "--eval-dir", "/here"), "--eval-dir")
    assert_refused(command("spectrum", us_net, "--data-dir", "/here"), "bundled")


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


def test_a_real_process_ends_in_one_line_and_code_2(tmp_path: Path) -> None:
    done = anywidth("spectrum", tmp_path)
    assert_refused(Answer(done.returncode, done.stdout, done.stderr), "anywidth: ", str(tmp_path))
