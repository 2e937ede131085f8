"""A run's folder: one writer, what is damaged is refused by name, and nothing is lost."""

import errno
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from checkpointed_runs import Settings, run_with, tensors_at

from anywidth.app.runs.folder_lock import lock_folder
from anywidth.app.runs.run import Run
from anywidth.app.runs.settings import from_json
from anywidth.app.runs.training_state import capture_random_state, restore_random_state
from anywidth.errors import AnywidthError


def test_create_open_and_configuration(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "deep" / "run", Settings(epochs=5))
    again = Run.open(str(run.folder))
    assert again.settings_data == run.settings_data == {"version": 1, "task": "test", "epochs": 5}
    assert from_json(Settings, again.settings_data) == Settings(epochs=5)
    assert again.load_checkpoint() is None
    assert not again.finished


def test_create_refuses_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(AnywidthError, match="--resume"):
        Run.create(tmp_path, Settings())
    for folder in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "run"):
        with pytest.raises(AnywidthError, match="--out"):
            Run.create(folder, Settings())


def test_statistics_and_weights_are_replaced_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path / "run", Settings())
    old = {"x": torch.zeros(1)}
    run.save_final({"model": old, "statistics": old}, {})
    new = {"x": torch.ones(1)}
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=[None, full]))
    with pytest.raises(AnywidthError, match="No space"):
        run.save_statistics(new, model=new)
    monkeypatch.undo()
    assert all(run.load_part(part)[0]["x"] == 0 for part in ("model", "statistics"))


def test_a_kill_between_weights_and_statistics_leaves_them_of_one_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path / "run", Settings())
    old = {"x": torch.zeros(1), "y": torch.zeros(1)}
    run.save_final({"model": old, "statistics": {"1/x": torch.zeros(1)}}, {})
    replace, calls = os.replace, []

    def killed(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save_statistics({"1/x": torch.ones(1)}, model={**old, "x": torch.ones(1)})
    monkeypatch.undo()
    assert run.load_part("statistics")[0]["1/x"] == 1
    assert run.model_tensors() == {"x": 1, "y": 0}
    copy = Run.open_finished(shutil.copytree(run.folder, tmp_path / "copy"), writing=True)
    copy.save_statistics({"2/x": torch.ones(1)})
    assert copy.model_tensors() == {"x": 1, "y": 0}
    run.save_statistics({"1/x": torch.ones(1)}, model={**old, "x": torch.ones(1)})
    assert run.model_tensors() == run.load_part("model")[0] == {"x": 1, "y": 0}


def test_a_read_only_run_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run.create(tmp_path / "run", Settings())
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(AnywidthError, match="read-only"):
        Run.open(tmp_path / "run", writing=True)


def test_create_takes_a_folder_whose_creation_was_killed(tmp_path: Path) -> None:
    (tmp_path / ".config.json.1a2b3c4d.tmp").write_text('{"ver')
    Run.create(tmp_path, Settings())
    assert os.listdir(tmp_path) == ["config.json"]


def test_open_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(AnywidthError, match="nowhere"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(AnywidthError, match=r"config\.json"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_text('{"version": ')
    with pytest.raises(AnywidthError, match="truncated"):
        Run.open(tmp_path)


def test_a_truncated_mark_of_the_end_says_how_to_mend_it(tmp_path: Path) -> None:
    run = Run.create(tmp_path, Settings())
    run.save_final({"model": {}, "statistics": {}}, {})
    (tmp_path / "finished.json").write_text('{"ver')
    with pytest.raises(AnywidthError, match="truncated"):
        run.state()


def test_a_changed_mark_of_the_end_is_noticed(tmp_path: Path) -> None:
    run = Run.create(tmp_path, Settings())
    run.save_final({"model": {}, "statistics": {}}, {"classes": ["cat", "dog"]})
    assert run.state() == {"classes": ["cat", "dog"]}
    path = tmp_path / "finished.json"
    path.write_text(path.read_text().replace("dog", "dig"))
    with pytest.raises(AnywidthError, match=r"finished\.json"):
        run.state()


def test_a_run_opened_for_reading_saves_nothing_and_removes_nothing(tmp_path: Path) -> None:
    run_with(tmp_path, 10)
    leftover = tmp_path / "checkpoints" / ".step-000000020.00000000.tmp"
    leftover.mkdir()
    reader = Run.open(tmp_path)
    for save in (
        lambda: reader.save_checkpoint(20, {}, {}),
        lambda: reader.save_final({}, {}),
        lambda: reader.save_statistics({}),
    ):
        with pytest.raises(AnywidthError, match="writing=True"):
            save()
    assert leftover.exists()
    Run.open(tmp_path, writing=True)
    assert not leftover.exists()


def test_a_run_has_one_writer(tmp_path: Path) -> None:
    """Another process is refused while this one may write, and not a moment longer."""
    opens = "import sys; from anywidth.app.runs.run import Run; Run.open(sys.argv[1], writing=True)"
    # The same lock without the seconds that PyTorch takes to import.
    locks = (
        "import pathlib, sys; from anywidth.app.runs.folder_lock import lock_folder\n"
        "lock_folder(pathlib.Path(sys.argv[1]))"
    )

    def other(script: str = locks) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True)

    run = run_with(tmp_path, 10)
    assert "another process" in other(opens).stderr
    again = Run.open(tmp_path, writing=True)
    del run
    assert other().returncode == 1
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    del again
    assert other().returncode == 0, "a worker that lives on holds the run"
    child.kill()


def test_who_waits_for_a_folder_gets_it_once_it_is_free(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    code = (
        "import pathlib, sys; from anywidth.app.runs.folder_lock import lock_folder\n"
        "print('waiting', flush=True)\n"
        "held = lock_folder(pathlib.Path(sys.argv[1]), wait=True); print('held')"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "waiting\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        del lock
        assert other.wait(60) == 0
        assert other.stdout.read() == "held\n"


def test_errors_of_a_run_name_the_file(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10)
    run.save_final({"model": tensors_at(12)["model"], "statistics": {}}, {})
    (tmp_path / "finished.json").write_text("{}")
    with pytest.raises(AnywidthError, match=r"finished\.json"):
        run.state()
    run.settings_data["epochs"] = "x"
    with pytest.raises(AnywidthError, match="epochs"):
        run.read_settings(Settings)
    unreadable = AnywidthError("model.safetensors: cannot be read (Permission denied)")
    unreadable.__cause__ = PermissionError()
    with (
        mock.patch("anywidth.app.runs.run.load_tensors", side_effect=unreadable),
        pytest.raises(AnywidthError, match="denied"),
    ):
        run.model_tensors()


def test_looking_at_a_run_does_not_disturb_who_writes_to_it(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10)
    begun = tmp_path / "checkpoints" / ".step-000000020.00000000.tmp"
    begun.mkdir()
    with pytest.raises(AnywidthError, match="--resume"):
        Run.open_finished(tmp_path, writing=True)
    run.save_final({"model": tensors_at(12)["model"], "statistics": {}}, {})
    weights = {"weight": torch.ones(2)}
    Run.open_finished(tmp_path, writing=True).save_statistics({}, model=weights)
    assert begun.exists()
    assert run.model_tensors().keys() == {"weight"}


def test_the_finished_network_comes_before_checkpoints(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    with pytest.raises(AnywidthError, match="checkpoint"):
        run.model_tensors()
    run.save_checkpoint(10, tensors_at(10), {"epoch": 1})
    assert run.model_tensors()["steps"] == 10
    assert run.state() == {"epoch": 1}
    with pytest.raises(AnywidthError, match="'statistics'"):
        run.load_part("statistics")
    with pytest.raises(AnywidthError, match="--resume"):
        run.save_statistics({})

    run.save_final({"model": tensors_at(12)["model"], "statistics": {}}, {"epoch": 3})
    reader = Run.open(tmp_path)
    assert reader.finished
    assert reader.model_tensors()["steps"] == 12
    assert reader.state() == {"epoch": 3}
    run.save_statistics({"mean": torch.ones(2)}, {"widths": "[0.5]"})
    assert torch.equal(reader.load_part("statistics")[0]["mean"], torch.ones(2))
    assert reader.load_part("statistics")[1] == {"widths": "[0.5]"}
    with pytest.raises(AnywidthError, match="'optimizer'"):
        reader.load_part("optimizer")


@pytest.mark.parametrize("part", ["model", "statistics"])
def test_a_damaged_finished_run_says_what_is_missing_and_how_to_mend_it(
    tmp_path: Path, part: str
) -> None:
    run = run_with(tmp_path)
    run.save_final({"model": tensors_at(12)["model"], "statistics": {}}, {"epoch": 3})
    path = tmp_path / f"{part}.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(AnywidthError, match="damaged"):
        run.load_part(part)
    path.unlink()
    with pytest.raises(AnywidthError, match="missing"):
        run.load_part(part)
    path.mkdir()
    with pytest.raises(AnywidthError, match="folder"):
        run.load_part(part)
    run.save_checkpoint(12, tensors_at(12), {"epoch": 3})
    with pytest.raises(AnywidthError, match=f"move {path}"):
        run.load_part(part)
    path.rmdir()
    with pytest.raises(AnywidthError, match="--resume"):
        run.load_part(part)


def test_random_state_of_every_generator_is_restored(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [
            torch.rand(3).tolist(),
            random.random(),
            random.gauss(),
            numpy.random.rand(3).tolist(),
            numpy.random.randn(),
        ]

    draw()  # leaves half a pair of normal draws in the generators
    tensors, structure = capture_random_state()
    run = Run.create(tmp_path, Settings())
    run.save_checkpoint(1, {"random": tensors}, {"random": structure})
    expected = draw()
    assert draw() != expected
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    restore_random_state(checkpoint.tensors["random"], checkpoint.state["random"])
    assert draw() == expected
