"""Running the real `anywidth` command, in processes of its own."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from anywidth.app import cli
from anywidth.measuring import heartbeat

HERE = Path(__file__).parent
# What a process says of itself on a slow machine.
HEARTBEAT = re.compile(r" \(\d+:\d\d:\d\d\)$")
USUAL_SILENCE, PATIENT = heartbeat.SILENCE, 1e9

# A training run of 30 steps that takes less than a second.
TINY_RUN = (
    "--model", "tiny_networks:tiny", "--total-stride", "none", "--divisor", "4",
    "--limit", "300", "--batch-size", "20", "--epochs", "2", "--device", "cpu",
    "--precision", "float32",
)  # fmt: skip


# Seconds: no measure of speed, which a busy machine may lack.
HANGS_AFTER = 300


def environment(**changes: str) -> dict[str, str]:
    # No empty entry, which is the working folder.
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "100", **changes}


def anywidth(*arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs `anywidth ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "anywidth", *map(str, arguments)],
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER,
    )


class Answer(NamedTuple):
    code: int
    output: str
    errors: str


def command(*arguments: object) -> Answer:
    """`anywidth ARGUMENTS` in this process, which saves the seconds a new one takes to start."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    # However slow the machine is, the answer has the same lines; a test may ask for a heartbeat.
    silence = PATIENT if heartbeat.SILENCE == USUAL_SILENCE else heartbeat.SILENCE
    with (
        mock.patch.object(heartbeat, "SILENCE", silence),
        mock.patch.object(sys, "argv", ["anywidth", *map(str, arguments)]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
    return Answer(code, output.getvalue(), errors.getvalue())


def start(*arguments: object, **changes: str) -> subprocess.Popen[str]:
    """Starts `anywidth ARGUMENTS` and returns the running process."""
    return subprocess.Popen(
        [sys.executable, "-m", "anywidth", *map(str, arguments)],
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background of a shell ignore Ctrl-C; this process is to hear it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def succeed(*arguments: object) -> Answer:
    """What a command that must work says."""
    answer = command(*arguments)
    assert answer.code == 0, answer.errors
    return answer


def assert_one_line(answer: Answer, *words: str) -> None:
    lines = [line for line in answer.errors.strip().splitlines() if not HEARTBEAT.search(line)]
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0]


def assert_refused(answer: Answer, *words: str) -> None:
    """A mistake is named in one line."""
    assert answer.code == 2, answer
    assert_one_line(answer, *words)


def csv_rows(path: Path) -> list[dict[str, str]]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script or module in two processes on this machine."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, "-m", *launcher, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER,
    )


def wait_for_step(process: subprocess.Popen[str], metrics: Path, step: int) -> None:
    """Returns once a training process has logged a step (it must log each)."""
    deadline = time.monotonic() + HANGS_AFTER
    while time.monotonic() < deadline:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        last = lines[-1].partition(",")[0] if lines else ""
        if last.isdigit() and int(last) >= step:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not reached: {lines[-3:]}")
