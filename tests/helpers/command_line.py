"""Running the real `anywidth` command, in processes of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from anywidth.app import cli

HERE = Path(__file__).parent

# A training run of 30 steps that takes less than a second.
TINY_RUN = (
    "--model", "tiny_networks:tiny", "--total-stride", "none", "--divisor", "4",
    "--limit", "300", "--batch-size", "20", "--epochs", "2", "--device", "cpu",
    "--precision", "float32",
)  # fmt: skip


# Seconds: no measure of speed, which a busy machine may lack.
HANGS_AFTER = 300


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
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
    with (
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
    )


def succeed(*arguments: object) -> Answer:
    """What a command that must work says."""
    answer = command(*arguments)
    assert answer.code == 0, answer.errors
    return answer


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
