"""Runs of other people execute nothing that they bring along, unless they are trusted."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import anywidth, command

from anywidth.app.runs.settings import to_json
from anywidth.app.tasks.classification.task import open_trained
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings
from anywidth.errors import AnywidthError

CODE = """
from pathlib import Path
Path("executed").touch()
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Conv2d(1, 16, 3, stride=4), nn.BatchNorm2d(16), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))
"""
TINY = ("--model", "received_code:build", "--limit", "64", "--batch-size", "32", "--epochs", "1",
        "--device", "cpu", "--no-report")  # fmt: skip


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run whose network is one's own code."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "received_code.py").write_text(CODE)
        assert command("train", *TINY, "--out", folder / "run").code == 0
    yield folder / "run"
    sys.modules.pop("received_code", None)


@pytest.fixture
def received(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run in a folder of other people, with code of the same name, which is the present one."""
    shutil.copytree(own, tmp_path / "run")
    (tmp_path / "received_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "received_code", raising=False)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "arguments",
    [
        ("predict", "run", "shirt.png"),
        ("export", "run", "--out", "net.pt2"),
        ("export", "run", "--out", "net.anywidth"),
        ("report", "run"),
        ("spectrum", "run"),
        ("calibrate", "run"),
        ("train", "--resume", "run"),
    ],
    ids=" ".join,
)
def test_a_received_run_executes_nothing(received: Path, arguments: tuple[str, ...]) -> None:
    answer = command(*arguments)
    assert answer.code == 2
    assert "--trust" in answer.errors
    assert "received_code:build" in answer.errors
    assert not (received.parent / "executed").exists()
    assert "received_code" not in sys.modules


@pytest.mark.parametrize("allowed", [("--trust",), ("--model", "received_code:build")])
def test_a_trusted_run_is_opened(received: Path, allowed: tuple[str, ...]) -> None:
    given = ("--widths", "0.5", "--samples", "32", "--device", "cpu")
    assert command("calibrate", received, *given, *allowed).code == 0
    assert (received.parent / "executed").exists()
    assert command("train", "--resume", received, "--no-report", *allowed).code == 0


def test_a_resumed_run_keeps_its_network(received: Path) -> None:
    answer = command("train", "--resume", received, "--model", "mobilenet_v1")
    assert answer.code == 2
    assert "--resume" in answer.errors


def test_python_is_told_too(received: Path) -> None:
    with pytest.raises(AnywidthError, match="received_code"):
        open_trained(received)


def test_an_environment_that_is_imported_is_refused(tmp_path: Path) -> None:
    settings = to_json(ReinforcementSettings(environment="gym:imported_games:Game-v0"))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "finished.json").write_text('{"version": 1, "state": {}}')
    for name in ("play", "spectrum"):
        refused = command(name, tmp_path)
        assert refused.code == 2
        assert "--trust" in refused.errors
    assert "imported_games" not in sys.modules


def test_python_m_imports_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what Python has, nor what a run may name, nor what may be installed or not."""
    names = ("__future__", "typing", "signal", "textwrap", "typer", "rich", "torch", "torchvision")
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"print('executed {name}')\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    answer = anywidth("inspect", "torchvision:alexnet", "--input", "3x64x64", "--no-verify")
    assert answer.returncode == 0, answer
    assert "executed" not in answer.stdout
