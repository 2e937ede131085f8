"""Options of commands: a value that cannot be, or that nothing reads, is refused at once."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from command_line import assert_refused, command

from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.app.tasks.super_resolution.task import SuperResolutionSettings
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.errors import AnywidthError


@pytest.mark.parametrize(
    ("recipe", "option", "value", "expected"),
    [
        ("fashion_mnist_demo", "learning_rate", "-1", "above"),
        ("fashion_mnist_demo", "learning_rate", "0", "above"),
        ("fashion_mnist_demo", "momentum", "-1", "below"),
        ("fashion_mnist_demo", "momentum", "5", "below"),
        ("fashion_mnist_demo", "weight_decay", "-1", "at least 0"),
        ("fashion_mnist_demo", "warmup_epochs", "-1", "at least 0"),
        ("fashion_mnist_demo", "workers", "-1", "at least 0"),
        ("fashion_mnist_demo", "calibration_samples", "-4", "at least 2"),
        ("fashion_mnist_demo", "calibration_samples", "0", "at least 2"),
        ("fashion_mnist_demo", "limit", "0", "at least 1"),
        ("fashion_mnist_demo", "truth", "2", "at most 1"),
        ("fashion_mnist_demo", "width", "0.25", "--method i"),
        ("fashion_mnist_demo", "total_stride", "4", "8, 16 or 32"),
        ("fashion_mnist_demo", "strides", "1,1,3,2,2", "1 or 2"),
        ("fashion_mnist_demo", "strides", "1,1,2,2", "five"),
        ("sr", "learning_rate", "-1", "above"),
        ("sr", "warmup_steps", "-1", "at least 0"),
        ("sr", "validation_pictures", "0", "at least 1"),
        ("sr", "width", "0.75", "--method i"),
        ("rl", "learning_rate", "-1", "above"),
        ("rl", "discount", "2", "at most 1"),
        ("rl", "smoothing", "-1", "at most 1"),
        ("rl", "clip", "0", "above"),
        ("rl", "gradient_clip", "0", "above"),
        ("rl", "entropy_weight", "-1", "at least 0"),
        ("rl", "width", "0.5", "--method i"),
    ],
)
def test_a_number_out_of_range_is_refused_before_there_is_a_run(
    recipe: str, option: str, value: str, expected: str, tmp_path: Path
) -> None:
    option_given = f"--{option.replace('_', '-')}={value}"
    answer = command("train", recipe, option_given, "--out", tmp_path / "run")
    assert answer.code == 2
    (line,) = answer.errors.splitlines()
    for word in (f"--{option.replace('_', '-')} ", value[:2], expected):
        assert word in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("switches", "expected"), [((0.5, 0.5), "differ"), ((0.5, 2.0), r"2\.0"), ((), "widths")]
)
def test_switches_that_cannot_be_trained_are_refused(
    switches: tuple[float, ...], expected: str
) -> None:
    with pytest.raises(AnywidthError, match=expected):
        ClassificationSettings(method="s", switches=switches).check()


@pytest.mark.parametrize(
    ("options", "unread", "because"),
    [
        ("--method i --truth 0.3", "truth", "method"),
        ("--method s --truth 0.3", "truth", "method"),
        ("--method i --nonuniform", "nonuniform", "method"),
        ("--private-affine", "private-affine", "method"),
        ("--rule random --distill", "distill", "rule"),
        ("--rule min+random --truth 0.3", "truth", "rule"),
        ("--no-distill --truth 0.3", "truth", "distill"),
        ("--no-distill --temperature 2", "temperature", "distill"),
        ("--data folder --data-dir / --cutout 8", "cutout", "folder"),
        ("--data folder --data-dir / --crop-padding 2", "crop-padding", "folder"),
        ("sr --distill none --truth 0.3", "truth", "distill"),
        ("rl --dual-clip 5", "dual-clip", "distill"),
        ("rl --method i --distill ppo", "distill", "method"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(
    options: str, unread: str, because: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anywidth.app.commands.train._train", pytest.fail)
    answer = command("train", *options.split(), "--out", tmp_path / "run")
    assert answer.code == 2
    (line,) = answer.errors.splitlines()
    assert line.index(unread) < line.index(because)


@pytest.mark.parametrize(
    "options",
    [
        "--method i",
        "--method s --no-distill",
        "--rule random --truth 0",
        "sr --distill none --truth 0",
    ],
)
def test_what_a_recipe_brings_or_asks_for_nothing_is_no_mistake(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anywidth.app.commands.train._train", lambda *rest, **more: True)
    answer = command("train", *options.split(), "--no-report", "--out", tmp_path / "run")
    assert (answer.code, answer.errors) == (0, "")


@pytest.mark.parametrize("settings", [ClassificationSettings(), SuperResolutionSettings()])
def test_every_number_has_a_range(settings: TaskSettings) -> None:
    numbers = {
        field.name: field
        for field in dataclasses.fields(settings)
        if re.match("int|float", str(field.type)) and field.name != "total_stride"
    }
    assert {name for name, field in numbers.items() if not field.metadata["limits"]} == set()


def test_show_lists_the_values_a_field_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = command("train", "--show").output
    for allowed in ("us | s | i", "sandwich | random | min+random | max+random", "test | split",
                    "exact | moving", "auto | float32 | bfloat16", "above 0"):  # fmt: skip
        assert f"; {allowed}" in shown
    assert "; none | l1 | l2" in command("train", "sr", "--show").output


def test_a_resumed_run_may_skip_damaged_files_and_take_other_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ClassificationSettings] = []

    def train(settings: ClassificationSettings, *rest: object, **more: object) -> bool:
        seen.append(settings)
        return False

    monkeypatch.setattr("anywidth.app.commands.train._train", train)
    begun = ClassificationSettings(epochs=3, width=1.0, device="cpu")
    Run.create(tmp_path / "run", begun)
    options = ("--skip-corrupt", "--workers", "2")
    answer = command("train", "--resume", tmp_path / "run", *options)
    assert answer.code == 130
    assert seen == [dataclasses.replace(begun, skip_corrupt=True, workers=2)]
    go_on = f"anywidth train --resume {tmp_path / 'run'} --skip-corrupt=true --workers=2\n"
    assert answer.output.endswith(go_on)
    refused = command("train", "--resume", tmp_path / "run", "--skip-corrupt", "--low", "0.5")
    assert refused.code == 2
    assert "--skip-corrupt" in refused.errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train --low 0.9 --high 0.5", "low"),
        ("train --teacher ema", "--teacher ema"),
        ("train --rule random --distill", "--rule random"),
        ("train --strides 1,1,2,2,2 --total-stride 8", "--total-stride 8"),
        ("train --image-size 5 --dry-run", "--image-size 5"),
        ("train --limit 3 --batch-size 64 --dry-run", "--batch-size 3"),
        ("train --data folder --dry-run", "--data-dir"),
        ("inspect mobilenet_v1 --low 2", "low 2"),
        ("inspect mobilenet_v1 --widths 0.1", "width 0.1"),
    ],
)
def test_errors_speak_of_options_and_not_of_code(arguments: str, said: str) -> None:
    answer = command(*arguments.split())
    assert_refused(answer, said)
    assert not re.search(r"WidthRange|in code|\bpass \w+=|\w+='|root", answer.errors)
