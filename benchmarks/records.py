"""What the benchmarks share: networks, clocks, a session on one thread, and records of results."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import anywidth as aw
from anywidth.app.studies.provenance import provenance

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


def random_network(build: Callable[[], nn.Module], widths: Sequence[float]) -> nn.Module:
    """A slimmable network for 224 px with random weights, calibrated at these widths."""
    torch.manual_seed(0)
    model = build()
    images = torch.randn(2, 3, 224, 224)
    aw.slimmable(model, example_input=images, verified=False)
    aw.calibrate(model, [images], widths=widths)
    return model.eval()


def milliseconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def in_turns(
    runs: Mapping[Any, Callable[[], Any]],
    rounds: int,
    timed: Callable[[Callable[[], Any]], Any] = milliseconds,
) -> dict[Any, list[Any]]:
    """The times of each run, which take turns, so that a busy machine slows all of them alike."""
    times: dict[Any, list[Any]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in sorted(runs, reverse=number % 2 == 0):
            times[name].append(timed(runs[name]))
    return times


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median ratio of times that were measured one after the other."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def open_session(network: Path | bytes) -> InferenceSession:
    """An ONNX file, or its bytes, as anybody would open it, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])


def circumstances(device: str | torch.device, *packages: str) -> dict[str, str]:
    """The command, versions, commit and device, with which every record begins."""
    command = ["python3", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    versions = {name: import_module(name).__version__ for name in packages}
    return {"command": shlex.join(command), **provenance(torch.device(device)), **versions}


def write_record(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, if a file was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
