"""Ctrl-C and SIGTERM end a command at any moment, and their exit codes differ."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import TINY_RUN, command, environment

from anywidth.app import interrupts
from anywidth.app.tasks.classification import task

SWALLOWING = "import signal\ntry: signal.raise_signal({number})\nexcept: pass\nprint('went on')\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_cannot_swallow_an_interrupt(number: signal.Signals, tmp_path: Path) -> None:
    """Some packages import others under a bare `except:`."""
    (tmp_path / "swallowing.py").write_text(SWALLOWING.format(number=int(number)))
    code = (
        # Where the tests run in the background, the system has it ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from anywidth.app.interrupts import stopped_by_signals\n"
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "with stopped_by_signals(): import swallowing\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "Stopped.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_exit_code_tells_the_signal(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = task._measure

    def signalled(*arguments: object) -> object:
        signal.raise_signal(number)
        return measure(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(task, "_measure", signalled)
    answer = command("train", *TINY_RUN, "--log-every", "1", "--out", tmp_path / "run")
    assert answer.code == 128 + number
    assert "--resume" in answer.output
    assert "Traceback" not in answer.errors


def test_before_training_sigterm_exits_as_a_signal_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "anywidth.distributed.start_processes",
        lambda *arguments: signal.raise_signal(signal.SIGTERM),
    )
    answer = command("train", *TINY_RUN, "--out", tmp_path / "run")
    assert (answer.code, answer.errors) == (143, "Stopped.\n")


def test_handlers_are_put_back_and_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.stopped_by_signals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is interrupts._stop
        assert signal.getsignal(signal.SIGTERM) is not interrupts._stop
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_the_first_imports_leaves_no_traceback() -> None:
    code = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupting:
    def find_spec(self, name, *_):
        if name == "anywidth.app.cli":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from anywidth.__main__ import run
run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""
