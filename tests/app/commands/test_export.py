"""`anywidth export` of many widths: a bundle, or one ONNX file that branches."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anywidth_runtime
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from anywidth_runtime.server.page_routes import read_examples
from anywidth_runtime.server.picture_files import PictureInput
from command_line import HANGS_AFTER, command, environment
from finished_runs import (
    CLASSES,
    MEAN,
    STD,
    classifier_run,
    policy_run,
    trained_otherwise,
    upscaler_run,
)
from torch import Tensor, nn

import anywidth as aw
from anywidth.app.tasks.registry import open_trained
from anywidth.files import write_json

WIDTHS = [0.25, 0.5, 1.0]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier_run(tmp_path_factory.mktemp("export") / "classifier", WIDTHS)


def exported(run: Path, path: Path, widths: str = "0.25,0.5,1.0") -> str:
    answer = command("export", run, "--trust", "--widths", widths, "--out", path)
    assert answer.code == 0, answer.errors
    return answer.output


def sliced(run: Path, width: float, around: Callable[[nn.Module], Tensor]) -> Tensor:
    """What the network itself gives at a width."""
    model = open_trained(run, "cpu", with_data=False, trust=True).model.eval()
    with torch.no_grad(), aw.at_width(model, width):
        return around(model)


def test_a_bundle_of_a_classifier(classifier: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.anywidth"
    shown = exported(classifier, path)
    assert "3 widths" in shown
    assert "anywidth serve" in shown
    net = anywidth_runtime.open(path)
    assert net.widths == tuple(WIDTHS)
    assert net.classes == tuple(CLASSES)
    assert net.task == "classification"
    assert all(row.latency_ms is not None for row in net.table)
    images = np.random.default_rng(0).random((5, 1, 12, 12), np.float32)
    pixels = (torch.from_numpy(images) - MEAN[0]) / STD[0]
    for width in WIDTHS:
        true = sliced(classifier, width, lambda model: model(pixels))
        np.testing.assert_allclose(net.run(images, width=width), true, rtol=1e-4, atol=1e-5)


def test_what_was_measured_goes_into_the_table(classifier: Path, tmp_path: Path) -> None:
    model = open_trained(classifier, "cpu", with_data=False, trust=True).model
    found = aw.spectrum(model, lambda _: {"top1_error": 8.0}, [0.25, 0.5], progress=False)
    write_json(classifier / "spectrum.json", found.to_json())
    try:
        exported(classifier, tmp_path / "net.anywidth")
    finally:
        (classifier / "spectrum.json").unlink()
    net = anywidth_runtime.open(tmp_path / "net.anywidth")
    assert [row.accuracy for row in net.table] == [92.0, 92.0, None]
    assert net.table[0].metrics == {"top1_error": 8.0}
    assert net.accuracy_name == "top1_accuracy"


def test_a_bundle_of_an_upscaler_takes_pictures_of_any_size(tmp_path: Path) -> None:
    run = upscaler_run(tmp_path / "run")
    exported(run, tmp_path / "net.anywidth", "0.5,1.0")
    net = anywidth_runtime.open(tmp_path / "net.anywidth")
    assert net.task == "super_resolution"
    assert net.inputs[0].shape == ("batch", 3, "height", "width")
    images = np.random.default_rng(0).random((1, 3, 21, 34), np.float32)
    true = sliced(run, 0.5, lambda model: model(torch.from_numpy(images)).clamp(0, 1))
    np.testing.assert_allclose(net.run(images, width=0.5), true, rtol=1e-4, atol=1e-5)


def test_a_bundle_of_a_policy_has_two_outputs(tmp_path: Path) -> None:
    exported(policy_run(tmp_path / "run", "minatar:breakout"), tmp_path / "net.anywidth")
    net = anywidth_runtime.open(tmp_path / "net.anywidth")
    (given,) = net.inputs
    found = net.run(np.zeros((3, *given.shape[1:]), given.dtype), width=0.5)
    assert isinstance(found, dict)
    assert list(found) == ["logits", "values"]


def test_a_bundle_brings_inputs_to_try(classifier: Path, tmp_path: Path) -> None:
    """As its server reads them: each input fits the network."""
    games = exported_network(policy_run(tmp_path / "games", "minatar:breakout"), tmp_path)
    for one in read_examples(games):
        assert one.tensor is not None
        array = np.array(one.tensor["data"], "float32").reshape(one.tensor["shape"])
        assert len(games.run(array, width=1.0)["logits"]) == 1  # type: ignore[call-overload]
    assert len({one.picture for one in read_examples(games)}) > 3
    pictures = exported_network(upscaler_run(tmp_path / "pictures"), tmp_path)
    assert [one.name for one in read_examples(pictures)] == ["chart", "grass", "poster", "skyline"]
    images = exported_network(classifier, tmp_path)
    takes = PictureInput.of(images)
    assert takes is not None
    found = read_examples(images)
    assert len({one.name for one in found}) == 10
    assert takes.read(found[0].picture, 10**6).shape == (1, 1, 12, 12)


def test_a_run_whose_data_is_gone_is_exported_without_them(
    classifier: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(classifier, run)
    trained_otherwise(run, data="cifar10", data_dir=str(tmp_path / "moved"))
    assert read_examples(exported_network(run, tmp_path)) == []


def exported_network(run: Path, folder: Path) -> anywidth_runtime.Network:
    path = folder / f"{run.name}.anywidth"
    exported(run, path, "1.0")
    return anywidth_runtime.open(path)


def test_one_onnx_file_branches_by_width(classifier: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    exported(classifier, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    images = np.random.default_rng(0).random((5, 1, 12, 12), np.float32)
    pixels = (torch.from_numpy(images) - MEAN[0]) / STD[0]
    for asked, width in {0.1: 0.25, 0.25: 0.25, 0.4: 0.5, 0.5: 0.5, 0.8: 1.0, 1.0: 1.0}.items():
        feeds = {"images": images, "width": np.array(asked, np.float32)}
        true = sliced(classifier, width, lambda model: model(pixels))
        np.testing.assert_allclose(session.run(None, feeds)[0], true, rtol=1e-4, atol=1e-5)
    shared = [one for one in onnx.load(path).graph.initializer if np.prod(one.dims) >= 256]
    assert [list(one.dims) for one in shared] == [[16, 16, 3, 3]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--budget", "2ms", "--widths", "0.5", "--out", "a.anywidth"), ["2 ms", "--widths"]),
        (("--max-macs", "7", "--out", "a.anywidth"), ["--max-macs", "narrowest"]),
        (("--widths", "0.5", "--width", "0.5", "--out", "a.anywidth"), ["--width 0.5"]),
        (("--widths", "0.25,0.5", "--out", "a.pt2"), ["a.pt2", "--width"]),
        (("--widths", "a lot", "--out", "a.anywidth"), ["a lot"]),
        (("--widths", "0.5", "--out", "nowhere/a.anywidth"), ["nowhere"]),
        (("--width", "2", "--out", "a.onnx"), ["width", "2"]),
        (("--out", "a.tflite"), ["a.tflite", ".onnx"]),
        (("--out", "nowhere/a.pt2"), ["nowhere/a.pt2"]),
    ],
)
def test_wrong_options_are_named(
    classifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = command("export", classifier, "--trust", *options)
    assert answer.code == 2
    (line,) = answer.errors.splitlines()
    assert all(word in line for word in words), line
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_overwritten_only_if_asked_to(classifier: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    path.write_text("mine")
    asked = ("export", classifier, "--trust", "--width", "0.5", "--out", path)
    answer = command(*asked)
    assert answer.code == 2
    assert "--force" in answer.errors
    assert path.read_text() == "mine"
    assert command(*asked, "--force").code == 0
    assert path.read_bytes()[:2] == b"PK"


def test_at_a_terminal_it_asks(classifier: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    path.write_text("mine")
    ours, its = pty.openpty()
    asked = ["export", classifier, "--trust", "--width", "0.5", "--out", path]
    process = subprocess.Popen(
        [sys.executable, "-m", "anywidth", *map(str, asked)],
        stdin=its,
        stderr=its,
        env=environment(),
    )
    asked_for = b""
    while b"Overwrite" not in asked_for:  # on a slow machine it says before that it works
        asked_for += os.read(ours, 1000)
    os.write(ours, b"n\n")
    assert process.wait(HANGS_AFTER) == 130
    assert path.read_text() == "mine"


def test_a_bundle_within_a_budget(classifier: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.anywidth"
    model = open_trained(classifier, "cpu", with_data=False, trust=True).model
    most = aw.macs(model, 0.5)
    answer = command("export", classifier, "--trust", "--max-macs", most, "--out", path)
    assert answer.code == 0, answer.errors
    widths = anywidth_runtime.open(path).widths
    assert min(widths) == 0.25
    assert aw.macs(model, max(widths)) == most
