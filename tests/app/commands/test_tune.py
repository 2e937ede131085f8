"""`anywidth tune`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import assert_refused, command, succeed

import anywidth as aw
from anywidth.app.tasks.registry import open_trained


@pytest.fixture(scope="module")
def calibrated(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    shutil.copytree(trained("bare"), run)
    succeed("calibrate", run, "--trust", "--widths", "0.25,0.5,1.0", "--device", "cpu")
    return run


def outputs(run: Path, width: float) -> torch.Tensor:
    found = open_trained(run, "cpu", with_data=False, trust=True)
    with torch.no_grad(), found.at(width):
        return found.model(torch.ones(2, 1, 28, 28))


def test_chosen_widths_are_tuned_and_saved(calibrated: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(calibrated, run)
    weights = (run / "model.safetensors").read_bytes()
    answer = succeed("tune", run, "--trust", "--widths", "0.25", "--learning-rate", "0.02",
                     "--device", "cpu")  # fmt: skip
    assert "1 width tuned over 300 images" in answer.output
    assert (run / "model.safetensors").read_bytes() == weights
    assert not torch.allclose(outputs(run, 0.25), outputs(calibrated, 0.25))
    for width in (0.5, 1.0):
        assert torch.equal(outputs(run, width), outputs(calibrated, width))
    before = outputs(run, 0.25)
    # All widths are calibrated for a spectrum; what was tuned stays.
    succeed("spectrum", run, "--trust", "--widths", "0.25,0.75,1.0", "--no-latency",
            "--device", "cpu")  # fmt: skip
    torch.testing.assert_close(outputs(run, 0.25), before)
    found = open_trained(run, "cpu", with_data=False, trust=True).model
    small = aw.extract(found, 0.25).eval()
    torch.testing.assert_close(small(torch.ones(2, 1, 28, 28)), before)


@pytest.mark.parametrize(
    ("options", "word"),
    [(("--widths", "0.75"), "anywidth calibrate"), (("--widths", "1.0"), "full"),
     (("--widths", "0.5", "--epochs", "0"), "--epochs"),
     (("--widths", "0.5", "--learning-rate", "nan"), "--learning-rate nan"),
     (("--widths", "2"), "2")],
)  # fmt: skip
def test_bad_input_is_named(calibrated: Path, options: tuple[str, ...], word: str) -> None:
    before = (calibrated / "statistics.safetensors").read_bytes()
    assert_refused(command("tune", calibrated, "--trust", "--device", "cpu", *options), word)
    assert (calibrated / "statistics.safetensors").read_bytes() == before
