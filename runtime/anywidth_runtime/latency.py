"""How long each width takes on this machine, kept beside the file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime

from anywidth_runtime.bundle_file import Bundle
from anywidth_runtime.errors import RequestError
from anywidth_runtime.sessions import Sessions

_VERSION = 1
_WARM_UP = 3


@dataclass(frozen=True)
class Table:
    """Median milliseconds per width."""

    milliseconds: Mapping[float | str, float]

    @staticmethod
    def read(bundle: Bundle, threads: int) -> Table | None:
        """What was measured here: kept beside the file, or by the exporter on this machine."""
        machine = this_machine(threads)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            data = json.loads(_kept_at(bundle.path).read_bytes())
            kept = {"version": _VERSION, "bundle": bundle.checksum, "machine": machine}
            if {name: data[name] for name in kept} == kept:
                times = {_width(name): float(ms) for name, ms in data["milliseconds"]}
                is_whole = set(times) == {row.width for row in bundle.contents.rows}
                if is_whole and all(0 < ms < math.inf for ms in times.values()):
                    return Table(times)
        rows = bundle.contents.rows
        known = {row.width: row.latency_ms for row in rows if row.latency_ms is not None}
        is_here = dict(bundle.contents.machine) == machine
        return Table(known) if is_here and len(known) == len(rows) else None

    def keep(self, bundle: Bundle, threads: int) -> None:
        """Writes it beside the file; a folder that cannot be written to is no reason to fail."""
        path = _kept_at(bundle.path)
        data = {
            "version": _VERSION,
            "bundle": bundle.checksum,
            "machine": this_machine(threads),
            "milliseconds": [[width, round(ms, 6)] for width, ms in self.milliseconds.items()],
        }
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        with contextlib.suppress(OSError):
            try:
                temporary.write_text(json.dumps(data, indent=1) + "\n")
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)


def this_machine(threads: int) -> dict[str, str]:
    """What a latency depends on, in words."""
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
) -> Table:
    """Times all widths in turn."""
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise RequestError(f"repeats={repeats!r}: expected a whole number of at least 1")
    contents = bundle.contents
    variants = sorted(set(contents.variants))
    times: dict[int, list[float]] = {variant: [] for variant in variants}
    with _bar("measuring widths", len(variants) * repeats, progress) as advance:
        fits = sum(bundle.variants[variant].memory for variant in variants) <= sessions.memory_limit
        rounds = [variants] * repeats if fits else [[v] * repeats for v in variants]
        for order in rounds:
            for variant in order:
                session = sessions.get(variant)
                for _ in range(0 if times[variant] else _WARM_UP):
                    session.run(None, dict(feeds))
                start = time.perf_counter()
                session.run(None, dict(feeds))
                times[variant].append(1000 * (time.perf_counter() - start))
                advance()
    medians = {variant: statistics.median(found) for variant, found in times.items()}
    pairs = zip(contents.rows, contents.variants, strict=True)
    return Table({row.width: medians[variant] for row, variant in pairs})


def _kept_at(path: Path) -> Path:
    return path.with_name(path.name + ".latency.json")


def _width(name: float | str) -> float | str:
    return name if isinstance(name, str) else float(name)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{platform.machine()}, {line.partition(':')[2].strip()}"
    return f"{platform.machine()}, {platform.processor()}"


@contextlib.contextmanager
def _bar(label: str, steps: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar of one line, if anybody is looking."""
    done = 0
    is_shown = shown and sys.stderr.isatty()

    def advance() -> None:
        nonlocal done
        done += 1
        if is_shown:
            filled = 30 * done // steps
            bar = "█" * filled + "·" * (30 - filled)
            print(f"\r{label} {bar} {done}/{steps}", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if is_shown:
            print(file=sys.stderr)
