"""Ray Serve on this machine: replicas, one of them killed under load; and when to add one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray_driver
from anywidth_runtime.ray_scaling import replicas_for_width
from command_line import environment
from served import write_tiny_bundle
from tiny_networks import PIXELS

from benchmarks.http_load import Answered, infer_request, send_at

STARTS_WITHIN = 180.0
# More than one replica can answer at full width, less than two can. Few, as Ray's own work for
# each takes many times what the network does.
PER_SECOND = 1.7 / ray_driver.SECONDS_AT_FULL_WIDTH
# Long enough for a busy machine to stand still for a moment.
DEADLINE_MS = 1500.0
# What a request has at the client: Ray's own way takes a while too.
PATIENCE_MS = 2 * DEADLINE_MS
CHUNK_SECONDS = 3.0


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    bundle = write_tiny_bundle(tmp_path_factory.mktemp("bundle"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    driver = subprocess.Popen(
        [sys.executable, ray_driver.__file__, str(bundle), str(number)],
        env=environment(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout is not None
        ready = driver.stdout.readline()
        assert ready.strip() == "ready", driver.communicate(timeout=60)[1][-3000:]
        yield number
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.communicate("\n", timeout=60)
        driver.kill()


def replica_processes() -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:default:anywidth"):
                found.append(int(folder.name))
    return found


def send(port: int, seconds: float) -> list[Answered]:
    tensor = {"name": "input", "shape": [1, 1, PIXELS, PIXELS], "datatype": "FP32"}
    asked = {
        "inputs": [{**tensor, "data": [0.0] * PIXELS**2}],
        "parameters": {"deadline_ms": DEADLINE_MS},
    }
    request = infer_request(port, "net", json.dumps(asked).encode(), None)
    return send_at(port, np.arange(0, seconds, 1 / PER_SECOND).tolist(), request)


def mean_width(answers: list[Answered]) -> float:
    return float(np.mean([one.parameters.get("width", 0.0) for one in answers]))


def test_a_killed_replica_costs_width_not_answers(port: int) -> None:
    """Up to three times: on a busy machine other programs cost answers too."""
    shares: list[float] = []
    while len(shares) < 3 and max(shares, default=0) < 0.99:
        shares.append(share_in_time_around_a_kill(port))
    assert max(shares) >= 0.99


def share_in_time_around_a_kill(port: int) -> float:
    end = time.monotonic() + STARTS_WITHIN
    while mean_width(answers := send(port, CHUNK_SECONDS)) < 0.95:
        assert time.monotonic() < end, "two replicas never reached the full width"
    before = replica_processes()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    lowest = last = 1.0
    while time.monotonic() < end and not (lowest < 0.85 and last > 0.9):
        chunk = send(port, CHUNK_SECONDS)
        answers += chunk
        last = mean_width(chunk)
        lowest = min(lowest, last)
    assert lowest < 0.85, "one replica alone has to run narrower"
    assert last > 0.9, "two of them need not"
    assert len(set(replica_processes()) - set(before)) == 1
    in_time = [one.status == 200 and one.milliseconds <= PATIENCE_MS for one in answers]
    return float(np.mean(in_time))


def context(
    replicas: int, widths: list[float], busy: list[float], target: float = 0.8
) -> SimpleNamespace:
    """What Ray tells a policy."""

    def by_replica(values: list[float]) -> dict[Any, float]:
        return dict(enumerate(values))

    return SimpleNamespace(
        target_num_replicas=replicas,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
        aggregated_metrics={
            "mean_width": by_replica(widths),
            "target_width": by_replica([target] * len(widths)),
            "busy": by_replica(busy),
        },
    )


@pytest.mark.parametrize(
    ("replicas", "widths", "busy", "wanted"),
    [
        (1, [0.9], [0.9], 1),
        (1, [0.7], [1.0], 2),
        (2, [0.9, 0.6], [1.0, 1.0], 3),
        (4, [0.5] * 4, [1.0] * 4, 4),
        (2, [1.0, 1.0], [0.3, 0.3], 1),
        (2, [1.0, 1.0], [0.4, 0.4], 2),
        (1, [1.0], [0.0], 1),
        (2, [], [], 2),
    ],
)
def test_replicas_follow_the_width_served(
    replicas: int, widths: list[float], busy: list[float], wanted: int
) -> None:
    assert replicas_for_width(context(replicas, widths, busy))[0] == wanted
