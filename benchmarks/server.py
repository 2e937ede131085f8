"""An hour of requests in a few minutes, at three times what the widest width can answer.

    python3 -m benchmarks.server --out benchmarks/results/server.json

The server runs in a separate process and serves MobileNet v1 at 224 px with one worker. Requests
are JPEG files; they arrive as in the Azure trace `conv` (19,366 requests in an hour), sped up. The
benchmark counts answers by status and answers that reach the client in time, and records the
server's memory: nothing may be lost, and memory must not grow. Client and server share the machine.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import anywidth_runtime
import numpy as np
from PIL import Image

from benchmarks.governor import trace_arrivals
from benchmarks.governor_networks import PIXELS, build
from benchmarks.http_load import Answered, image_request, send_at, statuses
from benchmarks.records import circumstances, write_record

LOAD = 3.0
PAGE_BYTES = 4096


class Memory(threading.Thread):
    """Records the memory of a process once per second."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._path = Path(f"/proc/{process}/statm")
        self.megabytes: list[float] = []

    def run(self) -> None:
        while self._path.exists():
            self.megabytes.append(int(self._path.read_text().split()[1]) * PAGE_BYTES / 1e6)
            time.sleep(1)


def picture() -> bytes:
    """A JPEG file, as large as that of a photograph."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    smooth = Image.fromarray(pixels).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    smooth.save(file, "JPEG", quality=90)
    return file.getvalue()


def summary(answers: list[Answered], deadline_ms: float, memory: list[float]) -> dict[str, Any]:
    served = [one for one in answers if one.status == 200]
    times = [one.milliseconds for one in served]
    third = max(1, len(memory) // 3)
    return {
        "requests": len(answers),
        "statuses": {str(status): count for status, count in sorted(statuses(answers).items())},
        "in_time_at_client": sum(t <= deadline_ms for t in times) / len(answers),
        "milliseconds": {f"p{p}": float(np.percentile(times, p)) for p in (50, 99)},
        "mean_width": float(np.mean([one.parameters["width"] for one in served])),
        "megabytes_first_third": float(np.mean(memory[:third])),
        "megabytes_last_third": float(np.mean(memory[-third:])),
        "megabytes_by_time": memory[:: max(1, len(memory) // 20)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--files", type=Path, help="keep the networks here; else they are rebuilt")
    parser.add_argument("--requests", type=int, help="only so many of the trace")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        bundle, _ = build(arguments.files or Path(temporary))
        rows = anywidth_runtime.open(bundle).measure(progress=False)
        widest = max(row.latency_ms or 0.0 for row in rows)
        deadline = 5 * widest
        moments = trace_arrivals("conv", LOAD * 1000 / widest)[: arguments.requests]
        command = [sys.executable, "-m", "anywidth_runtime", "serve", str(bundle), "--port", "0"]
        server = subprocess.Popen([*command, "--workers", "1"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r":(\d+)$", server.stdout.readline().strip())
            assert found is not None
            port = int(found[1])
            memory = Memory(server.pid)
            memory.start()
            query = f"deadline_ms={deadline:.1f}"
            request = image_request(port, bundle.stem, picture(), query)
            answers = send_at(port, moments.tolist(), request)
        finally:
            server.terminate()
            server.wait()
    record = {
        **circumstances("cpu", "onnxruntime"),
        "deadline_ms": deadline,
        "widest_ms": widest,
        "load": LOAD,
        **summary(answers, deadline, memory.megabytes),
    }
    print(json.dumps(record, indent=1))
    write_record(arguments.out, record)


if __name__ == "__main__":
    main()
