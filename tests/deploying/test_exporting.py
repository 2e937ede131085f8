"""`anywidth export`: files that give what the network gives, and need nothing of this library."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import onnxruntime
import pytest
import torch
from command_line import command
from finished_runs import CLASSES, MEAN, STD, classifier_run, policy_run, upscaler_run
from torch import Tensor

import anywidth as aw
from anywidth.app.tasks.registry import open_trained
from anywidth.app.tasks.reinforcement import policies
from anywidth.app.tasks.reinforcement import task as reinforcement
from anywidth.app.tasks.super_resolution import task as super_resolution
from anywidth.deploying import exporting

of_each_format = pytest.mark.parametrize("suffix", [".onnx", ".pt2"])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier_run(tmp_path_factory.mktemp("export") / "classifier", [0.5])


@pytest.fixture(scope="module")
def upscaler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return upscaler_run(tmp_path_factory.mktemp("export") / "upscaler")


def write(run: Path, path: Path, width: float) -> str:
    answer = command("export", run, "--trust", "--width", width, "--out", path)
    assert answer.code == 0, answer.errors
    return answer.output


def outputs_of(path: Path, values: Tensor) -> list[Tensor]:
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path)
        (name,) = (one.name for one in session.get_inputs())
        return [torch.as_tensor(found) for found in session.run(None, {name: values.numpy()})]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of how it reads the file
        found = torch.export.load(path).module()(values)
    return [found] if isinstance(found, Tensor) else list(found)


def assert_same(found: list[Tensor], true: list[Tensor]) -> None:
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@of_each_format
def test_pixels_go_into_a_classifier(classifier: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"network{suffix}"
    shown = write(classifier, path, 0.5)
    images = torch.rand(5, 1, 12, 12)
    trained = open_trained(classifier, "cpu", with_data=False, trust=True)
    with torch.no_grad(), aw.at_width(trained.model, 0.5):
        true = trained.model((images - MEAN[0]) / STD[0])
    assert_same(outputs_of(path, images), [true])
    assert "0.5" in shown
    assert "1 x 12 x 12" in shown


@of_each_format
def test_a_picture_of_any_size_goes_into_an_upscaler(
    upscaler: Path, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"network{suffix}"
    write(upscaler, path, 0.75)
    images = torch.rand(1, 3, 21, 34)
    trained = super_resolution.open_trained(upscaler, "cpu", with_data=False)
    with torch.no_grad(), aw.at_width(trained.model, 0.75):
        true = trained.model(images).clamp(0, 1)
    assert_same(outputs_of(path, images), [true])


@of_each_format
@pytest.mark.parametrize("environment", ["minatar:breakout", "atari:breakout"])
def test_observations_go_into_a_policy(tmp_path: Path, suffix: str, environment: str) -> None:
    run = policy_run(tmp_path / "run", environment)
    path = tmp_path / f"network{suffix}"
    write(run, path, 0.5)
    trained = reinforcement.open_trained(run, "cpu")
    game = policies.make_environment(environment, 3, seed=1)
    seen = torch.from_numpy(game.reset())
    game.close()
    with torch.no_grad(), aw.at_width(trained.model, 0.5):
        true = trained.model(seen)
    assert_same(outputs_of(path, seen), list(true))


def test_the_file_knows_its_classes(classifier: Path, tmp_path: Path) -> None:
    write(classifier, tmp_path / "network.onnx", 0.5)
    session = onnxruntime.InferenceSession(tmp_path / "network.onnx")
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == CLASSES
    write(classifier, tmp_path / "network.pt2", 0.5)
    kept = {"classes": "", "takes": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.load(tmp_path / "network.pt2", extra_files=kept)
    assert kept == facts


def test_a_program_runs_without_the_library(classifier: Path, tmp_path: Path) -> None:
    write(classifier, tmp_path / "network.pt2", 0.5)
    code = (
        "import sys, torch; network = torch.export.load(sys.argv[1]).module(); "
        "assert network(torch.rand(3, 1, 12, 12)).shape == (3, 10); "
        "assert not [name for name in sys.modules if name.startswith('anywidth')]"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "network.pt2")]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_a_converter_gets_wrong_is_not_written(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, open_ = exporting._FORMATS[".pt2"]

    def off(content: bytes) -> exporting.Runner:
        run = open_(content)
        return lambda values: [1.01 * one for one in run(values)]

    monkeypatch.setitem(exporting._FORMATS, ".pt2", (encode, off))
    path = tmp_path / "network.pt2"
    answer = command("export", classifier, "--trust", "--width", "0.5", "--out", path)
    assert answer.code == 2
    assert "0.01" in answer.errors
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_before_anything_is_done(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    answer = command("export", classifier, "--trust", "--out", tmp_path / "a.onnx")
    assert answer.code == 2
    assert "anywidth[onnx]" in answer.errors
