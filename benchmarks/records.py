"""What the benchmarks share: a clock, a session on one thread, and the record of a result."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anywidth.app.studies.provenance import provenance

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


def milliseconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def open_session(network: Path | bytes) -> InferenceSession:
    """An ONNX file, or its bytes, as anybody would open it, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])


def circumstances(device: str | torch.device) -> dict[str, str]:
    """The command, versions, commit and device, with which every record begins."""
    command = ["python3", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    return {"command": shlex.join(command), **provenance(torch.device(device))}


def write_record(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, if a file was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
