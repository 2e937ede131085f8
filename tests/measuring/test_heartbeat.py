"""Long work is never silent: whatever is innermost says that it goes on."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from anywidth.measuring import heartbeat
from anywidth.measuring.heartbeat import nothing, speaking, working
from anywidth.measuring.progress import training_progress


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SILENCE", 0.02)
    monkeypatch.setattr(heartbeat, "_TICK", 0.005)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_silent_work_gives_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    heard = ""

    def hear() -> bool:
        nonlocal heard
        heard += capsys.readouterr().err
        return heard.count("drawing the report (0:00:0") >= 2

    with working("outer work"), working("drawing the report"):
        wait_until(hear)
    assert "outer" not in heard


def test_work_that_shows_itself_or_waits_for_the_user_is_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with working("asking"), speaking(nothing()):
        time.sleep(0.1)
    with working("asked not to", shown=False):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_lines_of_progress_go_on_although_no_step_ends() -> None:
    file = io.StringIO()
    with training_progress(100, console=Console(file=file)) as progress:
        progress.update(3)
        wait_until(lambda: file.getvalue().count("training 3/100") >= 2)


def test_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with working("training"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_one_thread_watches_and_ends_with_the_work() -> None:
    def watchers() -> int:
        return sum(thread.name == "anywidth-heartbeat" for thread in threading.enumerate())

    for _ in range(20):
        with working("short"):
            assert watchers() == 1
    wait_until(lambda: watchers() == 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_can_work_too() -> None:
    with working("parent"):
        child = os.fork()
        if child == 0:
            with working("child"):
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
