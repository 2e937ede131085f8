"""Servers in processes of their own: overload, shutdown, wrong options."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import anywidth_runtime
import numpy as np
import pytest
from command_line import anywidth, environment
from governed import gamma_arrivals
from served import HANGS_AFTER, heavy_body, serving_process, write_heavy_bundle

from benchmarks.http_load import Answered, infer_request, send_at, statuses

SECONDS = 4.0
MANY = 150


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heavy_bundle(tmp_path_factory.mktemp("bundle"))


def memory(process: subprocess.Popen[str]) -> int:
    """Bytes that a process has in memory."""
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def capacity(bundle: Path) -> float:
    """Requests per second that the widest width can answer."""
    return 1000 / max(row.latency_ms or 0 for row in anywidth_runtime.open(bundle).table)


def test_three_times_the_capacity_loses_nothing_and_keeps_memory_flat(bundle: Path) -> None:
    rate = 3 * capacity(bundle)
    moments = gamma_arrivals(round(SECONDS * rate), rate, 4)
    body, length = heavy_body(deadline_ms=200)
    with serving_process(bundle, "--most-waiting", 64, "--workers", 1) as (process, port):
        request = infer_request(port, "heavy", body, length)
        send_at(port, moments[: len(moments) // 4], request)
        before = memory(process)
        answers = send_at(port, moments, request)
        assert memory(process) - before < 50e6
    found = statuses(answers)
    assert set(found) <= {200, 503}
    assert sum(found.values()) == len(moments)
    served = [one.parameters for one in answers if one.status == 200]
    # It answers with narrower widths what the widest could not.
    assert served
    assert np.mean([one["width"] for one in served]) < 0.9


def test_a_server_told_to_end_answers_what_it_accepted(bundle: Path) -> None:
    body, length = heavy_body(width=1.0)
    options = ("--most-waiting", 500, "--workers", 1)
    with serving_process(bundle, *options) as (process, port):
        request = infer_request(port, "heavy", body, length)
        answers: list[Answered] = []
        sending = threading.Thread(
            target=lambda: answers.extend(send_at(port, [0.0] * MANY, request))
        )
        sending.start()
        _wait_until_accepted(port, MANY)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_AFTER) == 0
        sending.join(HANGS_AFTER)
    assert statuses(answers) == {200: MANY}


def _wait_until_accepted(port: int, count: int) -> None:
    """Until the server has read all requests and some still wait."""
    names = ("anywidth_requests_waiting", 'anywidth_requests_total{outcome="answered"}')
    end = time.monotonic() + HANGS_AFTER
    while time.monotonic() < end:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            text = reply.read().decode()
        waiting, answered = (float(text.partition(f"\n{name} ")[2].split()[0]) for name in names)
        # One more is running.
        if waiting + answered >= count - 1:
            assert waiting > 0
            return
    raise AssertionError(f"{count} requests were never accepted")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("nowhere.anywidth",), "nowhere.anywidth"),
        (("BUNDLE", "--deadline-ms", "0"), "deadline_ms"),
        (("BUNDLE", "--least-accuracy", "90"), "accuracy"),
        (("BUNDLE", "--token-file", "nowhere"), "nowhere"),
        (("BUNDLE", "--port", "70000"), "70000"),
        (("BUNDLE", "--replicas", "2"), "--ray"),
        (("nowhere.anywidth", "--ray"), "nowhere.anywidth"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    bundle: Path, options: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    given = [str(bundle) if option == "BUNDLE" else option for option in options]
    done = subprocess.run(
        [sys.executable, "-m", "anywidth_runtime", "serve", *given],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER,
    )
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_serving_needs_no_torch(bundle: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from anywidth_runtime.server import options; "
        "import anywidth_runtime.server.running; options.main(['serve', '--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--deadline-ms" in done.stdout


def test_anywidth_serve_is_the_same_server(bundle: Path, tmp_path: Path) -> None:
    body, length = heavy_body(deadline_ms=30_000)
    with serving_process(bundle, "--name", "mine", module="anywidth") as (_, port):
        (answer,) = send_at(port, [0.0], infer_request(port, "mine", body, length))
    assert answer.status == 200
    assert answer.parameters["in_time"]
    failed = anywidth("serve", tmp_path / "nowhere.anywidth")
    assert failed.returncode == 2
    assert "nowhere.anywidth" in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1
