"""Progress is a live bar in a terminal, plain lines elsewhere, and silent above rank 0."""

import io
import os
import pty
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from rich.console import Console

import anywidth.measuring.progress
from anywidth.errors import AnywidthError
from anywidth.measuring.progress import _format, tracked, training_progress

Pipe = tuple[Console, Callable[[], list[str]]]


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(anywidth.measuring.progress, "monotonic", clock)
    return clock


@pytest.fixture
def pipe() -> Pipe:
    """A console that is no terminal, and what was printed to it."""
    file = io.StringIO()
    return Console(file=file), lambda: file.getvalue().splitlines()


@contextmanager
def terminal() -> Iterator[tuple[Console, Callable[[], str]]]:
    """A console on a real pseudo-terminal, and what it has received once closed."""
    reader, writer = pty.openpty()
    received: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(reader, 65536)
            except OSError:  # the other side was closed
                return
            received.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    with open(writer, "w") as file:
        yield Console(file=file, width=100), lambda: b"".join(received).decode()
    thread.join(timeout=10)
    os.close(reader)


def test_a_line_every_tenth_of_the_work(clock: Clock, pipe: Pipe) -> None:
    console, lines = pipe
    with training_progress(200, images_per_step=64, console=console) as progress:
        for step in range(1, 201):
            clock.now += 0.05
            progress.update(step, epoch="1/2", **{"loss 0.25": 2.0 / step, "loss 1.0": 1.0 / step})
    assert len(lines()) == 10
    assert lines()[0] == (
        "training 20/200 (10%)  epoch 1/2  loss 0.25 0.1  loss 1.0 0.05  1,280 images/s  "
        "0:00:01 elapsed  0:00:09 left"
    )
    assert lines()[-1].startswith("training 200/200 (100%)")
    assert lines()[-1].endswith("0:00:10 elapsed  0:00:00 left")
    assert "\x1b" not in "".join(lines())
    assert "\r" not in "".join(lines())


def test_a_line_every_five_seconds_of_slow_work(clock: Clock, pipe: Pipe) -> None:
    console, lines = pipe
    with training_progress(1_000_000, console=console) as progress:
        for step in range(1, 101):
            clock.now += 1.0
            progress.update(step)
    assert len(lines()) == 20
    assert lines()[5] == (
        "training 30/1000000 (0%)  1.00 steps/s  0:00:30 elapsed  11 days, 13:46:10 left"
    )


def test_a_resumed_run_counts_from_where_it_was(clock: Clock, pipe: Pipe) -> None:
    console, lines = pipe
    with training_progress(100, 55, console=console) as progress:
        for step in range(56, 101):
            clock.now += 0.5
            progress.update(step)
    assert [line.split()[1] for line in lines()] == [f"{n}/100" for n in (60, 70, 80, 90, 100)]
    assert lines()[0].endswith("2.00 steps/s  0:00:02 elapsed  0:00:20 left")


def test_the_pace_is_that_of_late(clock: Clock, pipe: Pipe) -> None:
    console, lines = pipe
    with training_progress(400, console=console) as progress:
        for step in range(1, 401):
            clock.now += 1.0 if step <= 200 else 0.1
            progress.update(step)
    assert "10.00 steps/s" in lines()[-1]


def test_an_interrupted_block_says_where_it_stopped(clock: Clock, pipe: Pipe) -> None:
    console, lines = pipe

    def train() -> None:
        with training_progress(100, console=console) as progress:
            progress.update(3, loss=0.5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert len(lines()) == 1
    assert lines()[0].startswith("training 3/100 (3%)  loss 0.5")


def test_a_field_stays_until_it_is_given_again(clock: Clock, pipe: Pipe) -> None:
    console, lines = pipe
    with training_progress(2, console=console) as progress:
        progress.update(1, loss=0.123456, epoch=1)
        progress.update(2, loss=0.1)
    assert "loss 0.1235  epoch 1" in lines()[0]
    assert "loss 0.1  epoch 1" in lines()[1]


def test_a_tensor_is_refused(pipe: Pipe) -> None:
    console, _ = pipe
    with (
        training_progress(2, console=console) as progress,
        pytest.raises(AnywidthError, match="'loss'"),
    ):
        progress.update(1, loss=torch.tensor(1.0))  # type: ignore[arg-type]


def test_only_the_first_rank_prints(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    console, lines = pipe
    monkeypatch.setenv("RANK", "1")
    assert list(tracked(range(3), "calibrating", console=console)) == [0, 1, 2]
    assert lines() == []
    monkeypatch.setenv("RANK", "0")
    assert list(tracked(range(3), "calibrating", console=console)) == [0, 1, 2]
    assert len(lines()) == 3


def test_tracked_takes_the_length_where_there_is_one(clock: Clock, pipe: Pipe) -> None:
    console, lines = pipe
    assert list(tracked([5, 6], "evaluating", console=console)) == [5, 6]
    assert lines()[-1].startswith("evaluating 2/2 (100%)")
    assert list(tracked((n for n in [5, 6]), "evaluating", console=console)) == [5, 6]
    assert lines()[-1] == "evaluating 2  0.00 steps/s  0:00:00 elapsed"
    assert list(tracked([], "evaluating", console=console)) == []


def test_the_default_is_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    list(tracked([1], "evaluating"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("evaluating 1/1 (100%)")


def test_colour_forced_on_a_pipe_gives_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    console = Console(file=file)
    assert console.is_terminal
    list(tracked(range(5), "evaluating", console=console))
    assert "\x1b" not in file.getvalue()


def test_a_terminal_gets_a_bar_with_everything_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with (
        terminal() as (console, received),
        training_progress(50, 20, images_per_step=8, console=console) as progress,
    ):
        for step in range(21, 51):
            progress.update(step, epoch="2/3", **{"accuracy 0.25": step / 100})
    drawn = received()
    plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", drawn)
    assert "\x1b[" in drawn
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1  # the cursor comes back
    last = plain[plain.rindex("training") :]
    assert "━" * 20 in last
    assert re.search(r"50/50 [\d,]+ images/s  \d:\d\d:\d\d elapsed  0:00:00 left", last)
    assert "epoch 2/3  accuracy 0.25 0.5" in last


def test_no_name_is_parted_from_its_value() -> None:
    fields = {f"measure{index}": 0.1234 for index in range(9)}
    with (
        terminal() as (console, received),
        training_progress(2, console=console) as progress,
    ):
        progress.update(1, **fields)
        progress.update(2)
    plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", received())
    last = plain[plain.rindex("training") :].splitlines()[1:]
    for name in fields:
        assert any(f"  {name} 0.1234" in line for line in last)


def test_large_numbers_are_written_out() -> None:
    assert _format("agent_steps", 10240.0) == "10,240"
    assert _format("loss", 0.61234) == "0.6123"
    assert _format("loss", float("nan")) == "nan"
