"""Open widths: shared by threads, opened once, bounded in memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anywidth_runtime
import numpy as np
import pytest
from anywidth_runtime import BundleError, RequestError, sessions
from handmade import INPUTS, WIDTHS, Handmade

X = np.random.default_rng(1).standard_normal((5, INPUTS)).astype(np.float32)


@pytest.mark.parametrize("memory_limit", [1, 2**30])
def test_many_threads_share_a_network(tmp_path: Path, memory_limit: int) -> None:
    """With room for one width alone, threads close each other's; every answer is right still."""
    made = Handmade()
    net = anywidth_runtime.open(made.write(tmp_path), memory_limit=memory_limit)
    expected = {width: made.expected(X, width) for width in WIDTHS}

    def work(seed: int) -> None:
        chance = np.random.default_rng(seed)
        for width in chance.choice(list(WIDTHS), 100):
            np.testing.assert_allclose(net.run(X, width=width), expected[width], rtol=1e-5)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, seed) for seed in range(8)]:
            done.result(timeout=120)
    assert len(net.open_widths) == (1 if memory_limit == 1 else 3)


def test_a_width_that_many_ask_for_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Counter[int] = Counter()
    together = threading.Barrier(8)
    open_session = sessions._open_session

    def counted(bundle, variant, threads):
        opened[variant] += 1
        return open_session(bundle, variant, threads)

    monkeypatch.setattr(sessions, "_open_session", counted)
    net = anywidth_runtime.open(Handmade().write(tmp_path))

    def work() -> None:
        together.wait()
        net.run(X, width=0.5)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result(timeout=120)
    assert opened == {1: 1}


def test_all_that_wait_for_a_width_hear_that_it_failed(tmp_path: Path) -> None:
    made = Handmade()
    made.graphs[1].graph.node[1].op_type = "Detonate"
    net = anywidth_runtime.open(made.write(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(net.run, X, width=0.5) for _ in range(8)]:
            with pytest.raises(BundleError, match="Detonate"):
                done.result(timeout=120)
    assert net.open_widths == ()
    net.run(X, width=0.25)


def test_closed_networks_open_again(tmp_path: Path) -> None:
    net = anywidth_runtime.open(Handmade().write(tmp_path))
    net.prepare()
    assert net.open_widths == tuple(WIDTHS)
    net.close()
    assert net.open_widths == ()
    net.run(X, width=1.0)


def test_a_file_may_be_replaced_while_it_is_open(tmp_path: Path) -> None:
    made = Handmade()
    path = made.write(tmp_path)
    net = anywidth_runtime.open(path)
    other = Handmade()
    other.first *= 2
    (tmp_path / "new").mkdir()
    other.write(tmp_path / "new").replace(path)
    np.testing.assert_allclose(net.run(X, width=0.5), made.expected(X, 0.5), rtol=1e-5)
    again = anywidth_runtime.open(path)
    np.testing.assert_allclose(again.run(X, width=0.5), other.expected(X, 0.5), rtol=1e-5)


POOL = """
import os, sys
sys.path[:0] = sys.argv[2:]
import anywidth_runtime
import numpy as np

def threads():
    return len(os.listdir("/proc/self/task"))

net = anywidth_runtime.open(sys.argv[1], threads=3)
net.run(np.zeros((1, 4), np.float32), width=0.25)
before = threads()
net.prepare()
second = anywidth_runtime.open(sys.argv[1], threads=3)
second.prepare()
assert threads() == before, (before, threads())
try:
    anywidth_runtime.open(sys.argv[1], threads=2)
except anywidth_runtime.RequestError as error:
    assert "3 threads" in str(error), error
else:
    raise AssertionError("two pools")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_all_widths_share_one_pool_of_threads(tmp_path: Path) -> None:
    folders = [str(Path(__file__).parent), str(Path(anywidth_runtime.__file__).parents[1])]
    arguments = [sys.executable, "-c", POOL, str(Handmade().write(tmp_path)), *folders]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "two"])
def test_threads_are_whole_numbers(tmp_path: Path, threads: object) -> None:
    with pytest.raises(RequestError, match="threads"):
        anywidth_runtime.open(Handmade().write(tmp_path), threads=threads)  # type: ignore[arg-type]
