"""Decoding on a GPU: its parts that need none. The rest runs in Triton's interpreter."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anywidth.app.data import decoding_on_gpu
from anywidth.app.data.decoding_on_gpu.read_ahead import ReadAhead

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def test_interpreted() -> None:
    """In a process of its own, because the interpreter must be chosen before Triton is imported."""
    checks = HERE / "interpreted" / "check_decoding_on_gpu.py"
    command = [sys.executable, "-m", "pytest", str(checks), "-p", "no:cacheprovider"]
    paths = [ROOT / "tests/training/gpu/kernels/interpreted", os.environ.get("PYTHONPATH", "")]
    finished = subprocess.run(
        [*command, "-o", "python_files=check_*.py"],
        env=os.environ
        | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_it_is_off_until_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not decoding_on_gpu.DECODES_ON_GPU
    assert decoding_on_gpu.obstacle(torch.device("cuda")) is not None
    monkeypatch.setattr(decoding_on_gpu, "DECODES_ON_GPU", True)
    assert "cpu" in str(decoding_on_gpu.obstacle(torch.device("cpu")))


def test_a_few_items_are_made_in_advance() -> None:
    made: list[int] = []
    enough = threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 2:
                enough.set()
            yield number

    ahead = ReadAhead[int](2)
    ahead.start(numbers())  # type: ignore[arg-type]
    assert enough.wait(60)
    assert [ahead.take(), ahead.take()] == [0, 1]
    assert ahead.end()
    assert len(made) <= 5
    assert ahead.end()


class Broken(Exception):
    """Python's own errors have no weak references."""


def test_an_error_comes_in_its_turn_and_is_freed_at_once() -> None:
    """Workers of a loader that the collector frees end after 5 seconds."""

    def failing() -> Iterator[int]:
        yield 1
        raise Broken("two")

    ahead = ReadAhead[int](2)
    ahead.start(failing())  # type: ignore[arg-type]
    assert ahead.take() == 1
    seen = None
    gc.disable()
    try:
        ahead.take()
    except Broken as error:
        seen = weakref.ref(error)
    assert ahead.end()
    try:
        assert seen is not None
        assert seen() is None
    finally:
        gc.enable()


def test_an_end_does_not_wait_for_the_whole_item() -> None:
    reading = threading.Event()

    def endless() -> Iterator[int]:
        while True:
            reading.set()
            yield 1

    ahead = ReadAhead[int](2)
    ahead.start(sum(ahead.until_ended(endless())) for _ in range(1))
    assert reading.wait(60)
    assert ahead.end()


def test_a_program_that_ends_in_the_middle_of_an_epoch_ends() -> None:
    code = (
        "import itertools; from anywidth.app.data.decoding_on_gpu.read_ahead import ReadAhead\n"
        "ahead = ReadAhead(2); ahead.start(number for number in itertools.count())\n"
        "print(ahead.take())"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "0\n", "")
