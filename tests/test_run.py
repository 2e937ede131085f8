"""A run survives being killed at any point, and what is damaged is refused by name."""

import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor

from anywidth.config import from_json
from anywidth.errors import AnywidthError
from anywidth.random_state import capture_random_state, restore_random_state
from anywidth.run import Run


@dataclass(frozen=True)
class Settings:
    task: ClassVar[str] = "test"
    version: ClassVar[int] = 1
    epochs: int = 3


def tensors_at(step: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(8, 4, generator=generator), "steps": torch.tensor(step)},
        "optimizer": {"momentum": torch.randn(8, 4, generator=generator)},
    }


def run_with(folder: Path, *steps: int) -> Run:
    run = Run.create(folder, Settings())
    for step in steps:
        run.save_checkpoint(step, tensors_at(step), {"epoch": step // 10})
    return run


def names(run: Run) -> list[str]:
    return sorted(os.listdir(run.folder / "checkpoints"))


def assert_is_step(run: Run, step: int) -> None:
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.step == step
    assert checkpoint.state == {"epoch": step // 10}
    for part, expected in tensors_at(step).items():
        assert checkpoint.tensors[part].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.tensors[part][name], tensor)


def test_create_open_and_configuration(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "deep" / "run", Settings(epochs=5))
    again = Run.open(str(run.folder))
    assert again.config_data == run.config_data == {"version": 1, "task": "test", "epochs": 5}
    assert from_json(Settings, again.config_data) == Settings(epochs=5)
    assert again.load_checkpoint() is None
    assert not again.finished


def test_create_refuses_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(AnywidthError, match=r"is not empty; .*--resume .*--out"):
        Run.create(tmp_path, Settings())
    for folder in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "run"):
        with pytest.raises(AnywidthError, match=r"cannot hold results .*another folder with --out"):
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
    with pytest.raises(AnywidthError, match=r"model\.safetensors: cannot be written \(No space"):
        run.save_statistics(new, model=new)
    monkeypatch.undo()
    assert all(run.load_part(part)[0]["x"] == 0 for part in ("model", "statistics"))


def test_create_takes_a_folder_whose_creation_was_killed(tmp_path: Path) -> None:
    (tmp_path / ".config.json.1a2b3c4d.tmp").write_text('{"ver')
    Run.create(tmp_path, Settings())
    assert os.listdir(tmp_path) == ["config.json"]


def test_open_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(AnywidthError, match="nowhere is not a run: there is no such folder"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(AnywidthError, match=r"is not a run: config\.json is missing"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_text('{"version": ')
    with pytest.raises(AnywidthError, match=r"config\.json: truncated or not JSON.* from a copy"):
        Run.open(tmp_path)


def test_a_truncated_mark_of_the_end_says_how_to_mend_it(tmp_path: Path) -> None:
    run = Run.create(tmp_path, Settings())
    run.save_final({"model": {}, "statistics": {}}, {})
    (tmp_path / "finished.json").write_text('{"ver')
    with pytest.raises(AnywidthError, match=r"finished\.json: truncated .* another --out"):
        run.state()


def test_a_changed_mark_of_the_end_is_noticed(tmp_path: Path) -> None:
    run = Run.create(tmp_path, Settings())
    run.save_final({"model": {}, "statistics": {}}, {"classes": ["cat", "dog"]})
    assert run.state() == {"classes": ["cat", "dog"]}
    path = tmp_path / "finished.json"
    path.write_text(path.read_text().replace("dog", "dig"))
    with pytest.raises(AnywidthError, match=r"finished\.json: its content does not fit"):
        run.state()


def test_the_newest_checkpoint_is_loaded_and_two_are_kept(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10, 20, 30)
    assert names(run) == ["step-000000020", "step-000000030"]
    assert_is_step(Run.open(tmp_path), 30)
    run.save_checkpoint(40, tensors_at(40), {"epoch": 4}, keep=3)
    assert len(names(run)) == 3
    run.save_checkpoint(50, tensors_at(50), {"epoch": 5}, keep=1)
    assert names(run) == ["step-000000050"]


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
    with pytest.raises(AnywidthError, match=r"step 10 lies before .*step-000000020"):
        run.save_checkpoint(10, tensors_at(10), {})
    with pytest.raises(AnywidthError, match="step -1 must be"):
        run.save_checkpoint(-1, tensors_at(10), {})


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
        with pytest.raises(AnywidthError, match=r"opened for reading; .*writing=True"):
            save()
    assert leftover.exists()
    Run.open(tmp_path, writing=True)
    assert not leftover.exists()


def test_a_run_has_one_writer(tmp_path: Path) -> None:
    """Another process is refused while this one may write, and not a moment longer."""
    script = "import sys; from anywidth.run import Run; Run.open(sys.argv[1], writing=True)"

    def other() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True)

    run = run_with(tmp_path, 10)
    assert f"{tmp_path}: another process is training this run" in other().stderr
    again = Run.open(tmp_path, writing=True)
    del run
    assert other().returncode == 1
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    del again
    assert other().returncode == 0, "a worker that lives on holds the run"
    child.kill()


def test_errors_of_a_run_name_the_file(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10)
    run.save_final({"model": tensors_at(12)["model"], "statistics": {}}, {})
    (tmp_path / "finished.json").write_text("{}")
    with pytest.raises(AnywidthError, match=r"finished\.json: no state in it"):
        run.state()
    run.config_data["epochs"] = "x"
    with pytest.raises(AnywidthError, match=r"config\.json: field 'epochs' is 'x'"):
        run.read_config(Settings)
    unreadable = AnywidthError("model.safetensors: cannot be read (Permission denied)")
    unreadable.__cause__ = PermissionError()
    with (
        mock.patch("anywidth.run.load_tensors", side_effect=unreadable),
        pytest.raises(AnywidthError, match=r"\(Permission denied\)$"),
    ):
        run.model_tensors()


def test_looking_at_a_run_does_not_disturb_who_writes_to_it(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10)
    begun = tmp_path / "checkpoints" / ".step-000000020.00000000.tmp"
    begun.mkdir()
    with pytest.raises(AnywidthError, match=r"has not finished training; .*--resume"):
        Run.open_finished(tmp_path, writing=True)
    run.save_final({"model": tensors_at(12)["model"], "statistics": {}}, {})
    weights = {"weight": torch.ones(2)}
    Run.open_finished(tmp_path, writing=True).save_statistics({}, model=weights)
    assert begun.exists()
    assert run.model_tensors().keys() == {"weight"}


def test_what_cannot_be_saved_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10)
    with pytest.raises(AnywidthError, match="the state to save is not JSON data"):
        run.save_checkpoint(20, tensors_at(20), {"loss": torch.tensor(1.0)})
    with pytest.raises(AnywidthError, match=r"step-000000020/model\.safetensors: 'step' is a int"):
        run.save_checkpoint(20, {"model": {"step": 3}}, {})  # type: ignore[dict-item]
    with pytest.raises(AnywidthError, match=r"part '\.\./model'"):
        run.save_checkpoint(20, {"../model": {}}, {})
    assert names(run) == ["step-000000010"]
    run.save_final(tensors_at(10), {"epoch": 1})
    with pytest.raises(AnywidthError, match="not JSON data"):
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
    assert one_line(caplog, rf"step-000000020/{file}: .*going back to step 10")
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
    script = "import sys; from anywidth.run import Run; Run.open(sys.argv[1]).load_checkpoint()"
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("damaged checkpoint refused: ")
    assert "run.py" not in line


def test_a_whole_file_of_another_checkpoint_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(tmp_path, 10, 20)
    exchange_for_another_step(tmp_path / "checkpoints" / "step-000000020" / "model.safetensors")
    assert_is_step(run, 10)
    assert one_line(caplog, r"model\.safetensors: its content does not fit")


def test_a_counter_changed_in_a_manifest_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(tmp_path, 10, 20)
    path = tmp_path / "checkpoints" / "step-000000020" / "manifest.json"
    path.write_text(path.read_text().replace('"epoch": 2', '"epoch": 3'))
    assert_is_step(run, 10)
    assert one_line(caplog, r"manifest\.json: its content does not fit")


def test_a_manifest_of_another_layout_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(tmp_path, 10, 20)
    path = tmp_path / "checkpoints" / "step-000000020" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    assert_is_step(run, 10)
    assert one_line(caplog, r"manifest\.json: layout version 2")


def test_if_all_are_damaged_each_is_listed(tmp_path: Path) -> None:
    run = run_with(tmp_path, 10, 20)
    for name in names(run):
        cut(0.5)(tmp_path / "checkpoints" / name / "model.safetensors")
    with pytest.raises(AnywidthError, match=r"every checkpoint is damaged") as error:
        run.load_checkpoint()
    assert "step-000000020/model.safetensors: " in str(error.value)
    assert "step-000000010/model.safetensors: " in str(error.value)


def test_the_finished_network_comes_before_checkpoints(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    with pytest.raises(AnywidthError, match="has no checkpoint yet"):
        run.model_tensors()
    run.save_checkpoint(10, tensors_at(10), {"epoch": 1})
    assert run.model_tensors()["steps"] == 10
    assert run.state() == {"epoch": 1}
    with pytest.raises(AnywidthError, match="no part 'statistics'; it has model, optimizer"):
        run.load_part("statistics")
    with pytest.raises(AnywidthError, match=r"is not finished; .*--resume"):
        run.save_statistics({})

    run.save_final({"model": tensors_at(12)["model"], "statistics": {}}, {"epoch": 3})
    reader = Run.open(tmp_path)
    assert reader.finished
    assert reader.model_tensors()["steps"] == 12
    assert reader.state() == {"epoch": 3}
    run.save_statistics({"mean": torch.ones(2)}, {"widths": "[0.5]"})
    assert torch.equal(reader.load_part("statistics")[0]["mean"], torch.ones(2))
    assert reader.load_part("statistics")[1] == {"widths": "[0.5]"}
    with pytest.raises(AnywidthError, match="no part 'optimizer'; it has model, statistics"):
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
    with pytest.raises(AnywidthError, match=r"truncated.* the finished run is damaged; restore it"):
        run.load_part(part)
    path.unlink()
    with pytest.raises(AnywidthError) as error:
        run.load_part(part)
    assert str(error.value) == (
        f"{path} is missing: the finished run is damaged; restore it from a copy, or train again "
        "with another --out"
    )
    path.mkdir()
    with pytest.raises(AnywidthError, match=r"cannot be read \(Is a directory\): the finished run"):
        run.load_part(part)
    run.save_checkpoint(12, tensors_at(12), {"epoch": 3})
    with pytest.raises(AnywidthError, match=rf"move {path} away, remove .*finished\.json, then"):
        run.load_part(part)
    path.rmdir()
    resume = rf"checkpoint: remove .*finished\.json, then `anywidth train --resume {tmp_path}`"
    with pytest.raises(AnywidthError, match=resume):
        run.load_part(part)


def test_a_checkpoint_that_cannot_be_written_is_named_as_it_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, 10)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("anywidth.files.os.fsync", full)
    monkeypatch.setattr("anywidth.run.sync_folder", lambda folder: None)
    with pytest.raises(AnywidthError) as error:
        run.save_checkpoint(20, tensors_at(20), {})
    path = tmp_path / "checkpoints" / "step-000000020" / "model.safetensors"
    assert str(error.value) == f"{path}: cannot be written (No space left on device)"
    assert names(run) == ["step-000000010"]


# Runs in its own interpreter. Each round forks a process that opens the run, resumes and saves,
# and dies by SIGKILL: just before its n-th call that changes the disk, for every n there is (which
# covers all states the disk can be in), or at a random time after a save.
KILLED_WRITER = textwrap.dedent("""
    import os, random, signal, sys, time, traceback
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from test_run import Run, Settings, tensors_at

    def count_down(calls):
        def dies(call):
            def wrapped(*arguments, **options):
                nonlocal calls
                if calls == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls -= 1
                return call(*arguments, **options)
            return wrapped
        for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, dies(getattr(os, name)))

    def write(folder, report, last):
        run = Run.open(folder, writing=True)
        checkpoint = run.load_checkpoint()
        step = checkpoint.step if checkpoint else 0
        while step < last:
            step += 1
            run.save_checkpoint(step, tensors_at(step), {"epoch": step // 10})
            os.write(report, step.to_bytes(4, "little"))
        run.save_final(tensors_at(step), {"epoch": step // 10})
        os._exit(0)

    def round(folder, last, calls=None, seconds=None):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            if calls is not None:
                count_down(calls)
            try:
                write(folder, writing, last)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writing)
        reports = b""
        if seconds is not None:
            reports = os.read(reading, 4)
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or status == 0, "the writer failed"
        while part := os.read(reading, 4096):
            reports += part
        os.close(reading)
        saved = int.from_bytes(reports[-4:], "little")
        run = Run.open(folder)
        checkpoint = run.load_checkpoint()
        step = checkpoint.step if checkpoint else 0
        assert step >= saved, f"step {saved} was saved, {step} was found"
        if checkpoint:
            for part, expected in tensors_at(step).items():
                for name, tensor in expected.items():
                    assert checkpoint.tensors[part][name].equal(tensor), (part, name)
        if run.finished:
            assert run.model_tensors()["steps"] == last
        return os.WIFSIGNALED(status), step

    root = Path(sys.argv[2])
    calls, killed = 0, True
    while killed:
        folder = root / f"calls-{calls}"
        Run.create(folder, Settings())
        killed, step = round(folder, last=3, calls=calls)
        assert not round(folder, last=4)[0]
        assert not [path for path in folder.rglob("*.tmp")]
        calls += 1
    Run.create(root / "random", Settings())
    rounds = random.Random(0)
    for _ in range(12):
        _, step = round(root / "random", last=10**6, seconds=rounds.uniform(0, 0.05))
    print("killed before", calls - 1, "calls; at random times up to step", step)
""")


def test_a_kill_at_any_moment_costs_at_most_the_steps_since_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    # A kill loses nothing that the system has been given, so a file system in memory is as good.
    memory = Path("/dev/shm")
    root = tempfile.mkdtemp(dir=memory) if memory.is_dir() else str(tmp_path)
    command = [sys.executable, "-W", "error", "-c", KILLED_WRITER, str(Path(__file__).parent), root]
    result = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    shutil.rmtree(root)
    assert result.returncode == 0, result.stderr
    assert "damaged" not in result.stderr
    words = result.stdout.split()
    assert int(words[2]) > 40, result.stdout
    assert int(words[-1]) >= 12, result.stdout


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
