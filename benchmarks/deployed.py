"""A bundle and a branching ONNX file against a static ONNX file per width.

    python -m benchmarks.deployed [--repeats 200] [--out benchmarks/results/deployed.json]

MobileNet v1 and ResNet-50 with random weights, 224 px, 13 widths, one image, one CPU thread. The
three ways take turns in short blocks of passes, so that a busy machine slows all of them alike. A
ratio compares the fastest passes of two blocks, and the result is the median over all blocks. There
are two ratios: of wall-clock time, and of CPU time, on which other processes have less influence.

It also measures the time to switch between open widths and to open one, the sizes of the files, and
(in a separate process) the memory of open widths.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidth_runtime
import numpy as np
import torch
import torchvision
from torch import nn

import anywidth as aw
from anywidth.deploying.branching import WIDTH, write_branches
from anywidth.deploying.bundling import named_widths, write_bundle
from anywidth.deploying.exporting import write_network
from anywidth.translating.called_network import described
from benchmarks.records import (
    circumstances,
    in_turns,
    median_ratio,
    milliseconds,
    open_session,
    random_network,
    write_record,
)

WIDTHS = [round(0.25 + 0.0625 * step, 4) for step in range(13)]
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet_v1": aw.models.mobilenet_v1,
    "resnet50": lambda: torchvision.models.resnet50(weights=None),
}
# The goals: largest ratios to a static file, milliseconds, and size over one full network.
GOALS = {
    "bundle_ratio": 1.03,
    "branches_ratio_from_half": 1.05,
    "switch_ms": 0.01,
    "open_ms": 30.0,
    "size_ratio": 1.1,
}
_IN_BLOCK = 5


def write_files(model: nn.Module, folder: Path) -> None:
    """`net.anywidth`, `net.onnx`, and `WIDTH.onnx` for each width."""
    deployment = described(model, input_names=["images"], output_names=["logits"])
    named = named_widths(model, WIDTHS)
    write_bundle(model, deployment, folder / "net.anywidth", named, measure_latency=False)
    write_branches(model, deployment, folder / "net.onnx", WIDTHS)
    for width in WIDTHS:
        write_network(aw.extract(model, width, fold=True), deployment, folder / f"{width}.onnx")


def fastest(run: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of the fastest of a few passes: wall-clock and CPU time."""
    times = []
    for _ in range(_IN_BLOCK):
        start = time.thread_time()
        wall = milliseconds(run)
        times.append((wall, 1000 * (time.thread_time() - start)))
    return min(wall for wall, _ in times), min(own for _, own in times)


def compare(folder: Path, width: float, repeats: int, branches: Any) -> dict[str, float]:
    """Milliseconds per image in each way, and ratios to the static file."""
    images = np.random.default_rng(0).random((1, 3, 224, 224), np.float32)
    network = anywidth_runtime.open(folder / "net.anywidth", verified=False)
    static = open_session(folder / f"{width}.onnx")
    chosen = {"images": images, WIDTH: np.array(width, np.float32)}
    ways: dict[str, Callable[[], Any]] = {
        "static": lambda: static.run(None, {"images": images}),
        "bundle": lambda: network.run(images, width=width),
        "branches": lambda: branches.run(None, chosen),
    }
    for run in ways.values():
        fastest(run)
    times = in_turns(ways, max(3, repeats // _IN_BLOCK), fastest)
    wall = {name: [one for one, _ in found] for name, found in times.items()}
    thread = {name: [one for _, one in found] for name, found in times.items()}
    found = {f"{name}_ms": statistics.median(one) for name, one in wall.items()}
    for name in ("bundle", "branches"):
        found[f"{name}_ratio"] = median_ratio(wall[name], wall["static"])
        found[f"{name}_thread_ratio"] = median_ratio(thread[name], thread["static"])
    return found


def opening(folder: Path) -> dict[str, float]:
    """Milliseconds to open the file, to open a width, and to switch to one that is open."""
    start = time.perf_counter()
    network = anywidth_runtime.open(folder / "net.anywidth")
    opened = 1000 * (time.perf_counter() - start)
    times = []
    for _ in range(3):
        network.close()
        times += [milliseconds(lambda w=w: network.prepare([w])) for w in WIDTHS]
    network.prepare()
    sessions, variants = network._sessions, [network._variants[width] for width in WIDTHS]
    rounds = 2000

    def switch() -> None:
        for _ in range(rounds):
            for variant in variants:
                sessions.get(variant)

    switched = min(milliseconds(switch) for _ in range(5)) / (rounds * len(variants))
    static = [milliseconds(lambda w=w: open_session(folder / f"{w}.onnx")) for w in WIDTHS]
    branches = milliseconds(lambda: open_session(folder / "net.onnx"))
    return {
        "file_ms": opened,
        "open_ms": statistics.median(times),
        "slowest_open_ms": max(times),
        "static_open_ms": statistics.median(static),
        "switch_ms": switched,
        "branches_file_ms": branches,
    }


MEMORY = """
import sys
from pathlib import Path
from benchmarks.deployed import WIDTHS, open_all, resident

folder, way, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
before = resident()
kept = open_all(folder, way, WIDTHS[:: len(WIDTHS) // count][-count:])
print(resident() - before)
"""


def resident() -> float:
    """Megabytes of memory of this process, without mapped files."""
    text = Path("/proc/self/status").read_text()
    return float(text.partition("RssAnon:")[2].split()[0]) / 1000


def open_all(folder: Path, way: str, widths: list[float]) -> Any:
    """Open widths in one of the three ways and run each once."""
    images = np.zeros((1, 3, 224, 224), np.float32)
    if way == "bundle":
        network = anywidth_runtime.open(folder / "net.anywidth", verified=False)
        return network, [network.run(images, width=width) for width in widths]
    if way == "static":
        sessions = [open_session(folder / f"{width}.onnx") for width in widths]
        return sessions, [session.run(None, {"images": images}) for session in sessions]
    session = open_session(folder / "net.onnx")
    for width in widths:
        session.run(None, {"images": images, WIDTH: np.array(width, np.float32)})
    return session


def memory(folder: Path) -> dict[str, float]:
    found = {}
    for way in ("static", "bundle", "branches"):
        for count in (4, len(WIDTHS)):
            arguments = [sys.executable, "-c", MEMORY, str(folder), way, str(count)]
            done = subprocess.run(arguments, capture_output=True, text=True, check=True)
            found[f"{way}_{count}_widths_mb"] = float(done.stdout)
    return found


def measure(build: Callable[[], nn.Module], repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(random_network(build, WIDTHS), folder)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        found: dict[str, Any] = {
            "bundle_bytes": sizes["net.anywidth"],
            "branches_bytes": sizes["net.onnx"],
            "full_network_bytes": sizes[f"{WIDTHS[-1]}.onnx"],
            "static_files_bytes": sum(sizes[f"{width}.onnx"] for width in WIDTHS),
            **opening(folder),
            **memory(folder),
        }
        branches = open_session(folder / "net.onnx")
        found["widths"] = {}
        for width in WIDTHS:
            found["widths"][str(width)] = compare(folder, width, repeats, branches)
            print(f"{width:<7} {json.dumps(found['widths'][str(width)])}", flush=True)
        return found


def reached(found: dict[str, Any]) -> dict[str, dict[str, float | bool]]:
    """Each goal, the measured value, and whether it was reached."""
    rows = {float(width): row for width, row in found["widths"].items()}
    values = {
        "bundle_ratio": max(row["bundle_ratio"] for row in rows.values()),
        "branches_ratio_from_half": max(
            row["branches_ratio"] for width, row in rows.items() if width >= 0.5
        ),
        "switch_ms": found["switch_ms"],
        "open_ms": found["open_ms"],
        "size_ratio": found["bundle_bytes"] / found["full_network_bytes"],
    }
    return {
        name: {"goal": goal, "measured": values[name], "reached": values[name] <= goal}
        for name, goal in GOALS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=200, help="timed images per width and way")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {
        **circumstances("cpu", "onnxruntime"),
        "repeats": arguments.repeats,
        "networks": {},
    }
    for name in arguments.networks:
        print(name, flush=True)
        found = measure(NETWORKS[name], arguments.repeats)
        figures["networks"][name] = {"goals": reached(found), **found}
        print(json.dumps(figures["networks"][name]["goals"], indent=1), flush=True)
    write_record(arguments.out, figures)


if __name__ == "__main__":
    main()
