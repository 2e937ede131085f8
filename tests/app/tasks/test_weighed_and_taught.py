"""How widths are weighed and taught, as settings of all three tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import TINY_RUN, assert_refused, command, succeed

from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.app.tasks.classification.task import open_trained
from anywidth.app.tasks.registry import task_named
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings
from anywidth.app.tasks.super_resolution.settings import SuperResolutionSettings
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.files import load_tensors
from anywidth.training.step import SandwichStep

CLASSIFICATION = ClassificationSettings(
    model="mobilenet_v1", total_stride=32, limit=64, batch_size=32, epochs=1, device="cpu",
    calibration_samples=32, validate_every=9,
)  # fmt: skip
TINY: list[TaskSettings] = [
    CLASSIFICATION,
    SuperResolutionSettings(
        channels=8, blocks=1, patch=12, batch_size=4, epochs=1, steps_per_epoch=4, warmup_steps=1,
        validation_pictures=1, device="cpu",
    ),
    ReinforcementSettings(
        environments=4, rollout=8, batch_size=16, epochs=1, steps=64, curve_games=1,
        longest_game=20, device="cpu",
    ),
]  # fmt: skip
OPTIONS = ("--weights", "paper", "--ema-decay", "0.8", "--teacher", "ema")


@pytest.mark.parametrize("settings", TINY, ids=lambda settings: settings.task)
def test_every_task_hands_them_to_its_step(
    settings: TaskSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[SandwichStep] = []
    made = SandwichStep.__init__

    def noted(self: SandwichStep, *arguments: object, **options: object) -> None:
        made(self, *arguments, **options)  # type: ignore[arg-type]
        steps.append(self)

    monkeypatch.setattr(SandwichStep, "__init__", noted)
    other = "balanced" if settings.weights == "paper" else "paper"
    settings = replace(settings, weights=other, ema_decay=0.8, teacher="ema")
    assert task_named(settings.task).train(Run.create(tmp_path / "run", settings), settings)
    (step,) = steps
    assert (step.weights, step.teaching.teacher) == (other, "ema")
    assert step.ema is not None
    assert step.ema.updates == step.count > 0
    kept = load_tensors(tmp_path / "run" / "model.safetensors")[0]
    for name, average in step.ema.network.named_parameters():
        assert torch.equal(kept[name], average.detach()), name


def test_a_broken_run_resumes_bit_for_bit_with_its_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = (*TINY_RUN, *OPTIONS, "--checkpoint-every", "4", "--no-report")
    succeed("train", *options, "--out", whole)
    step = SandwichStep.__call__

    def fail(self: SandwichStep, *arguments: object) -> object:
        if self.count == 17:
            raise RuntimeError("the power is gone")
        return step(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(SandwichStep, "__call__", fail)
        with pytest.raises(RuntimeError, match="power"):
            command("train", *options, "--out", broken)
    assert not (broken / "finished.json").exists()
    succeed("train", "--resume", broken, "--trust", "--no-report")
    for name in ("model.safetensors", "statistics.safetensors", "metrics.csv"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name


def test_the_kept_average_has_statistics_of_its_own(tmp_path: Path) -> None:
    settings = replace(CLASSIFICATION, ema_decay=0.8)
    assert task_named("classification").train(Run.create(tmp_path / "run", settings), settings)
    trained = open_trained(tmp_path / "run", "cpu")
    before = [buffer.clone() for buffer in trained.model.buffers() if buffer.is_floating_point()]
    trained.calibrate([1.0])
    after = [buffer for buffer in trained.model.buffers() if buffer.is_floating_point()]
    torch.testing.assert_close(before, after)


def test_what_has_no_effect_is_named(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    for options, word in (
        (("--method", "i", "--weights", "paper"), "--method i"),
        (("--method", "s", "--teacher", "ema"), "--method s"),
        (("--rule", "random", "--weights", "paper"), "widest"),
        (("--no-distill", "--teacher", "ema"), "distill"),
        (("--teacher", "ema"), "ema-decay"),
        (("--ema-decay", "1.5"), "below 1"),
        (("--weights", "sum"), "balanced"),
        (("--density", "log-uniform", "--method", "i"), "--method i"),
    ):
        assert_refused(command("train", *TINY_RUN, *options, *out), word)
    assert not (tmp_path / "run").exists()
    assert_refused(command("train", "sr", "--distill", "none", "--teacher", "ema"), "no effect")
    assert ReinforcementSettings(distill="ppo", teacher="ema").step_options()["teacher"] == "full"
