"""A fourth task is a folder and a line in the registry: here a module made up for the test."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from command_line import command
from torch import nn

import anywidth as aw
from anywidth.app.runs.loop import save_final
from anywidth.app.runs.run import Run
from anywidth.app.runs.settings import option
from anywidth.app.tasks import registry
from anywidth.app.tasks.registry import TASKS, Task
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.app.tasks.trained import Trained
from anywidth.measuring.spectra import Metric
from anywidth.translating.deployment import Deployment

COMMANDS = Path(registry.__file__).parents[1] / "commands"


@dataclass(frozen=True)
class SummingSettings(TaskSettings):
    task: ClassVar[str] = "summing"
    version: ClassVar[int] = 1

    steps: int = option(3, "updates", at_least=1)

    @property
    def network(self) -> str:
        return "sum"

    @property
    def trained_on(self) -> str:
        return "random numbers"

    def trained_widths(self) -> list[float]:
        return [self.low, self.high]


@dataclass(frozen=True)
class TrainedSum(Trained):
    metrics: ClassVar[Mapping[str, Metric]] = {"distance": Metric("distance", 3, True)}
    curves: ClassVar[Mapping[str, str]] = {}

    @staticmethod
    def network(run: Run, settings: SummingSettings) -> nn.Module:
        return build(settings)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        numbers = torch.ones(4, 8)
        return {"distance": float((model(numbers)[:, 0] - 8).abs().mean())}

    def deployment(self) -> Deployment:
        return Deployment((torch.rand(2, 8),), ("numbers",), ("sum",), ({0: "batch"},))


def build(settings: SummingSettings) -> nn.Module:
    torch.manual_seed(settings.seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    return aw.slimmable(model, None, settings.width_range, example_input=torch.rand(2, 8))


def train_run(run: Run, settings: SummingSettings) -> bool:
    model = build(settings)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    step = aw.SandwichStep(model, optimizer, nn.functional.mse_loss, None, settings.sampling())
    for _ in range(settings.steps):
        numbers = torch.rand(16, 8)
        step(numbers, numbers.sum(1, keepdim=True))
    save_final(run, model, {"steps": step.count})
    return True


def sums() -> SummingSettings:
    """Sums."""
    return SummingSettings()


def add_up(run: Path) -> None:
    """Sum."""


@pytest.fixture
def fourth(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("anywidth.app.tasks.summing.task")
    module.TASK = Task(SummingSettings, TrainedSum, train_run, (sums,), add_up)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "TASKS", (*TASKS, "summing"))


@pytest.mark.usefixtures("fourth")
def test_a_fourth_task_is_trained_measured_reported_and_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert command("train", "sums", "--steps", "2", "--device", "cpu", "--out", run).code == 0
    assert "US-sum on random numbers" in (run / "report.html").read_text()
    answer = command("spectrum", run, "--widths", "0.25,0.5,1.0", "--device", "cpu")
    assert answer.code == 0
    assert "distance" in answer.output
    assert command("export", run, "--width", "0.5", "--out", tmp_path / "sum.pt2").code == 0
    assert "sums" in command("train", "--list").output
    refused = command("search", run, "--macs", "100", "--device", "cpu")
    assert "summing" in refused.errors
    refused = command("predict", run, run / "report.html")
    assert "anywidth add_up" in refused.errors


def test_every_folder_is_a_task() -> None:
    folders = {path.parent.name for path in Path(registry.__file__).parent.glob("*/task.py")}
    assert folders == set(TASKS)


@pytest.mark.parametrize("path", sorted(COMMANDS.glob("*.py")), ids=lambda path: path.name)
def test_commands_ask_for_no_task_by_name(path: Path) -> None:
    """Studies are about classification alone."""
    text = path.read_text()
    assert not [name for name in TASKS if f'"{name}"' in text or f"tasks.{name}" in text]
