"""The latency of each width on this machine, saved next to the file."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import platform
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime import InferenceSession

from anywidth_runtime.bundle_file import Bundle
from anywidth_runtime.contents import Width
from anywidth_runtime.errors import RequestError
from anywidth_runtime.sessions import Sessions, session_options

_VERSION = 1
_WARM_UP = 3
# The largest size in bytes of the weights that are open at the same time during timing.
_MOST_AT_ONCE = 2**28

Latencies = Mapping[Width, float]
"""Median milliseconds per width."""


def read_latencies(bundle: Bundle, threads: int) -> Latencies | None:
    """Those measured on this machine: saved next to the file, or by the exporter."""
    measured_for = _measured_for(bundle, threads)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        data = json.loads(_kept_at(bundle.path).read_bytes())
        if {name: data[name] for name in measured_for} == measured_for:
            times = {_width(name): float(ms) for name, ms in data["milliseconds"]}
            is_whole = set(times) == {row.width for row in bundle.contents.rows}
            if is_whole and all(0 < ms < math.inf for ms in times.values()):
                return times
    rows = bundle.contents.rows
    known = {row.width: row.latency_ms for row in rows if row.latency_ms is not None}
    is_here = bundle.contents.machine == measured_for["machine"]
    return known if is_here and len(known) == len(rows) else None


def keep_latencies(times: Latencies, bundle: Bundle, threads: int) -> None:
    """Save them next to the file; a folder without write permission is not an error."""
    path = _kept_at(bundle.path)
    milliseconds = [[width, round(ms, 6)] for width, ms in times.items()]
    data = {**_measured_for(bundle, threads), "milliseconds": milliseconds}
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with contextlib.suppress(OSError):
        try:
            temporary.write_text(json.dumps(data, indent=1) + "\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def this_machine(threads: int) -> dict[str, str]:
    """The circumstances of a latency, in words."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(threads),
        "onnxruntime": onnxruntime.__version__,
    }


def measured(
    bundle: Bundle,
    sessions: Sessions,
    feeds: Mapping[str, np.ndarray],
    *,
    repeats: int,
    progress: bool,
) -> Latencies:
    """Time all widths in turn."""
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise RequestError(f"repeats={repeats!r}: expected a whole number of at least 1")
    count = len(bundle.variants)
    is_room = sum(variant.memory for variant in bundle.variants) <= sessions.memory_limit
    with _bar(count * repeats, progress) as advance:
        times = _times(sessions.get, count, feeds, repeats, is_room, advance)
    medians = [statistics.median(found) for found in times]
    pairs = zip(bundle.contents.rows, bundle.contents.variants, strict=True)
    return {row.width: medians[variant] for row, variant in pairs}


def time_graphs(
    graphs: Iterable[bytes],
    feeds: Mapping[str, np.ndarray],
    repeats: int = 20,
    advance: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Milliseconds of each repeat of ONNX graphs that hold their weights, run like a bundle's.

    As many graphs as fit into memory take turns.
    """
    options = session_options(threads=1)
    times: list[list[float]] = []
    waiting: list[InferenceSession] = []
    size = 0

    def time_those_that_wait() -> None:
        nonlocal size
        get = waiting.__getitem__
        times.extend(_times(get, len(waiting), feeds, repeats, True, advance))
        waiting.clear()
        size = 0

    for graph in graphs:
        if waiting and size + len(graph) > _MOST_AT_ONCE:
            time_those_that_wait()
        waiting.append(InferenceSession(graph, options, providers=["CPUExecutionProvider"]))
        size += len(graph)
    time_those_that_wait()
    return times


def _times(
    get: Callable[[int], InferenceSession],
    count: int,
    feeds: Mapping[str, np.ndarray],
    repeats: int,
    is_room: bool,
    advance: Callable[[], None],
) -> list[list[float]]:
    """Milliseconds of each repeat per session; they take turns if all fit into memory."""
    places = list(range(count))
    rounds = [places] * repeats if is_room else [[place] * repeats for place in places]
    times: list[list[float]] = [[] for _ in places]
    for place in itertools.chain.from_iterable(rounds):
        session = get(place)
        for _ in range(0 if times[place] else _WARM_UP):
            session.run(None, dict(feeds))
        start = time.perf_counter()
        session.run(None, dict(feeds))
        times[place].append(1000 * (time.perf_counter() - start))
        advance()
    return times


def _kept_at(path: Path) -> Path:
    return path.with_name(path.name + ".latency.json")


def _measured_for(bundle: Bundle, threads: int) -> dict[str, Any]:
    return {"version": _VERSION, "bundle": bundle.checksum, "machine": this_machine(threads)}


def _width(name: Width) -> Width:
    return name if isinstance(name, str) else float(name)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{platform.machine()}, {line.partition(':')[2].strip()}"
    return f"{platform.machine()}, {platform.processor()}"


@contextlib.contextmanager
def _bar(steps: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar of one line, if the output is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield lambda: None
        return
    numbers = itertools.count(1)

    def advance() -> None:
        done = next(numbers)
        bar = ("█" * (30 * done // steps)).ljust(30, "·")
        print(f"\rmeasuring widths {bar} {done}/{steps}", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        print(file=sys.stderr)
