"""Networks as files that run without this library: ONNX, or a program of `torch.export`.

A file is read back and run before it counts as written, so that a converter's mistake cannot reach
a device.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from anywidth.errors import AnywidthError, packages_for
from anywidth.files import write_atomically
from anywidth.planning.trace.exported_graphs import quiet
from anywidth.translating.deployment import Deployment, Runner
from anywidth.translating.onnx_graphs import open_onnx


def check_format(path: Path) -> None:
    """Refuse a file name without a known format, and a format whose packages are missing."""
    if path.suffix not in _FORMATS:
        raise AnywidthError(
            f"--out {path}: expected a name that ends in .anywidth (many widths), .onnx or .pt2 (a "
            "program for torch.export.load)"
        )
    if path.suffix == ".onnx":
        with packages_for("ONNX", "'anywidth[onnx]'"):
            for name in ("onnx", "onnxscript", "onnxruntime"):
                importlib.import_module(name)


def write_network(network: nn.Module, deployment: Deployment, path: Path) -> float:
    """Write a plain network in the format of the file name, and return the error of the file.

    The error is the largest difference between the outputs of the file and of the network for
    random input, relative to the largest output. If it is too large, nothing is written.
    """
    check_format(path)
    encode, open_ = _FORMATS[path.suffix]
    content = encode(network, deployment)
    difference = deployment.check(network, open_(content), str(path))
    write_atomically(path, content)
    return difference


def _encode_program(network: nn.Module, deployment: Deployment) -> bytes:
    file = io.BytesIO()
    with quiet():
        torch.export.save(deployment.program(network), file, extra_files=deployment.texts())
    return file.getvalue()


def _open_program(content: bytes) -> Runner:
    with quiet():
        network = torch.export.load(io.BytesIO(content)).module()
    return lambda *values: tree_leaves(network(*values))


def _encode_onnx(network: nn.Module, deployment: Deployment) -> bytes:
    return bytes(deployment.to_onnx(network).SerializeToString())


_FORMATS: dict[str, tuple[Callable[[nn.Module, Deployment], bytes], Callable[[bytes], Runner]]] = {
    ".onnx": (_encode_onnx, open_onnx),
    ".pt2": (_encode_program, _open_program),
}
