"""Checkpoints: the newest that is whole is used, and a damaged one is refused by name."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import assert_is_step, names, run_with, tensors_at

from anywidth.app.runs.run import Run
from anywidth.errors import AnywidthError


def test_the_newest_checkpoint_is_loaded_and_two_are_kept(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10, 20, 30)
    assert names(run) == ["step-000000020", "step-000000030"]
    assert_is_step(Run.open(tmp_path), 30)
    run.save_checkpoint(40, tensors_at(40), {"epoch": 4})
    assert names(run) == ["step-000000030", "step-000000040"]


def test_metadata_of_a_part_comes_back(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    run.save_checkpoint(1, tensors_at(1), {}, metadata={"model": {"plan": "[]"}})
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.metadata == {"model": {"plan": "[]"}, "optimizer": {}}
    assert run.load_part("model")[1] == {"plan": "[]"}


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10, 20)
    run.save_checkpoint(20, tensors_at(20), {"epoch": 99})
    run.save_checkpoint(20, tensors_at(20), {"epoch": 2})
    assert len(names(run)) == 2
    assert_is_step(Run.open(tmp_path), 20)


def test_an_earlier_step_is_refused(tmp_path: Path) -> None:
    run = run_with(tmp_path, 20)
    with pytest.raises(AnywidthError, match="step-000000020"):
        run.save_checkpoint(10, tensors_at(10), {})
    with pytest.raises(AnywidthError, match="-1"):
        run.save_checkpoint(-1, tensors_at(10), {})


def test_what_cannot_be_saved_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10)
    with pytest.raises(AnywidthError, match="JSON"):
        run.save_checkpoint(20, tensors_at(20), {"loss": torch.tensor(1.0)})
    with pytest.raises(AnywidthError, match="'step'"):
        run.save_checkpoint(20, {"model": {"step": 3}}, {})  # type: ignore[dict-item]
    with pytest.raises(AnywidthError, match=r"'\.\./model'"):
        run.save_checkpoint(20, {"../model": {}}, {})
    assert names(run) == ["step-000000010"]
    run.save_final(tensors_at(10), {"epoch": 1})
    with pytest.raises(AnywidthError, match="JSON"):
        run.save_final(tensors_at(20), {"loss": torch.tensor(1.0)})
    assert run.finished
    assert run.state() == {"epoch": 1}


def cut(length: float) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * length)])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def exchange_for_another_step(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-000000010" / path.name, path)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize(
    "damage",
    [cut(0), cut(0.02), cut(0.5), cut(0.99), flip_a_bit, Path.unlink],
    ids=["empty", "cut at 2 %", "cut at 50 %", "cut at 99 %", "bit flipped", "removed"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    damage: Callable[[Path], object],
) -> None:
    run_with(tmp_path, 10, 20)
    damage(tmp_path / "checkpoints" / "step-000000020" / file)
    run = Run.open(tmp_path, writing=True)
    for _ in range(2):
        assert_is_step(run, 10)
    assert one_line(caplog, rf"step-000000020/{file}: .*from step 10")
    run.save_checkpoint(15, tensors_at(15), {"epoch": 1})
    assert names(run) == ["step-000000010", "step-000000015"]
    assert_is_step(Run.open(tmp_path), 15)


def one_line(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    """Whether one line alone was logged, and says this."""
    (line,) = caplog.messages
    return "\n" not in line and re.search(words, line) is not None


def test_what_is_said_of_a_damaged_checkpoint_is_one_plain_line(tmp_path: Path) -> None:
    run_with(tmp_path, 10, 20)
    flip_a_bit(tmp_path / "checkpoints" / "step-000000020" / "model.safetensors")
    script = (
        "import sys; from anywidth.app.runs.run import Run; Run.open(sys.argv[1]).load_checkpoint()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True
    )
    (line,) = done.stderr.splitlines()
    assert "step-000000020" in line
    assert ".py" not in line


def test_a_whole_file_of_another_checkpoint_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(tmp_path, 10, 20)
    exchange_for_another_step(tmp_path / "checkpoints" / "step-000000020" / "model.safetensors")
    assert_is_step(run, 10)
    assert one_line(caplog, r"model\.safetensors: .*another checkpoint")


def count_further(manifest: dict[str, Any]) -> None:
    manifest["state"]["epoch"] = 3


def date_ahead(manifest: dict[str, Any]) -> None:
    manifest["version"] = 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [(count_further, "its content does not match"), (date_ahead, "layout version 2")],
)
def test_a_changed_manifest_is_refused(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[dict[str, Any]], None],
    reason: str,
) -> None:
    run = run_with(tmp_path, 10, 20)
    path = tmp_path / "checkpoints" / "step-000000020" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert_is_step(run, 10)
    assert one_line(caplog, rf"manifest\.json: {reason}")


def test_if_all_are_damaged_each_is_listed(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10, 20)
    for name in names(run):
        cut(0.5)(tmp_path / "checkpoints" / name / "model.safetensors")
    with pytest.raises(AnywidthError, match="damaged") as error:
        run.load_checkpoint()
    assert "step-000000020" in str(error.value)
    assert "step-000000010" in str(error.value)


def test_a_checkpoint_that_cannot_be_written_is_named_as_it_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, 10)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("anywidth.files.os.fsync", full)
    monkeypatch.setattr("anywidth.app.runs.checkpoints.sync_folder", lambda folder: None)
    with pytest.raises(AnywidthError) as error:
        run.save_checkpoint(20, tensors_at(20), {})
    path = tmp_path / "checkpoints" / "step-000000020" / "model.safetensors"
    assert str(error.value) == f"{path}: cannot be written (No space left on device)"
    assert names(run) == ["step-000000010"]
