"""Networks as files that run without this library: ONNX, or a program of `torch.export`.

A file is read back and run before it counts as written, so that a converter's mistake cannot reach
a device.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.planning.trace.exported_graphs import quiet

# Rounding differs between runtimes; a wrong operator differs by much more.
_TOLERANCE = 1e-3
# In the check, axes of variable size are larger than in the example by this much.
_GROWTH = 3

Runner = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Deployment:
    """A plain network and its input and outputs.

    Args:
        network: in evaluation mode, on the CPU.
        examples: a batch of at least two per input.
        takes: describes the input in words.
        input_names: names of the inputs in the file.
        output_names: names of the outputs in the file.
        free_axes: axes of each input whose size may vary: axis → name.
        facts: metadata kept in the file: name → text.
        task: the task it was trained for, in one word; None if not given.
    """

    network: nn.Module
    examples: tuple[Tensor, ...]
    takes: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    free_axes: tuple[Mapping[int, str], ...]
    facts: Mapping[str, str]
    task: str | None = None


def check_format(path: Path) -> None:
    """Refuse a file name without a known format, and a format whose packages are missing."""
    if path.suffix not in _FORMATS:
        raise AnywidthError(
            f"--out {path}: expected a name that ends in {' or '.join(_FORMATS)}: ONNX, or a "
            "program for torch.export.load"
        )
    if path.suffix == ".onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                raise AnywidthError(
                    f"ONNX needs the package {error.name!r}; install it with: "
                    "pip install 'anywidth[onnx]'"
                ) from error


def write_network(deployment: Deployment, path: Path) -> float:
    """Write a network in the format of the file name, and return the error of the file.

    The error is the largest difference between the outputs of the file and of the network for
    random input, relative to the largest output. If it is too large, nothing is written.
    """
    from anywidth.files import write_atomically

    check_format(path)
    encode, open_ = _FORMATS[path.suffix]
    with quiet():
        content = encode(deployment)
        difference = largest_difference(deployment, open_(content))
    if not difference < _TOLERANCE:
        raise AnywidthError(
            f"{path}: not written, because the converted network is wrong: its outputs differ by "
            f"{difference:.2g} of the largest output; expected less than {_TOLERANCE:g}"
        )
    write_atomically(path, content)
    return difference


def _encode_program(deployment: Deployment) -> bytes:
    file = io.BytesIO()
    torch.export.save(_program(deployment), file, extra_files=_facts(deployment))
    return file.getvalue()


def _open_program(content: bytes) -> Runner:
    network = torch.export.load(io.BytesIO(content)).module()
    return lambda *values: as_list(network(*values))


def to_onnx(deployment: Deployment) -> Any:
    """The network as an `onnx.ModelProto`, its weights inside."""
    converted = torch.onnx.export(
        _program(deployment),
        input_names=list(deployment.input_names),
        output_names=list(deployment.output_names),
        verbose=False,
    )
    assert converted is not None
    converted.model.metadata_props.update(_facts(deployment))
    return converted.model_proto


def _encode_onnx(deployment: Deployment) -> bytes:
    return bytes(to_onnx(deployment).SerializeToString())


def _open_onnx(content: bytes) -> Runner:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(*values: Tensor) -> list[Tensor]:
        feeds = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        return [torch.as_tensor(output) for output in session.run(None, feeds)]

    return run


_FORMATS: dict[str, tuple[Callable[[Deployment], bytes], Callable[[bytes], Runner]]] = {
    ".onnx": (_encode_onnx, _open_onnx),
    ".pt2": (_encode_program, _open_program),
}


def _facts(deployment: Deployment) -> dict[str, str]:
    return {"takes": deployment.takes, **deployment.facts}


def _program(deployment: Deployment) -> torch.export.ExportedProgram:
    axes = tuple(
        {axis: torch.export.Dim(name) for axis, name in named.items()}
        for named in deployment.free_axes
    )
    with torch.no_grad():
        return torch.export.export(
            deployment.network, deployment.examples, dynamic_shapes=axes, strict=False
        )


def largest_difference(deployment: Deployment, run: Runner) -> float:
    """For random input; axes of variable size are larger than in the example."""
    generator = torch.Generator().manual_seed(0)
    values = [
        _random_like(example, axes, generator)
        for example, axes in zip(deployment.examples, deployment.free_axes, strict=True)
    ]
    with torch.no_grad():
        pairs = list(zip(run(*values), as_list(deployment.network(*values)), strict=True))
    return max(
        float((found - true).abs().max() / true.abs().max().clamp_min(1e-12))
        for found, true in pairs
    )


def _random_like(example: Tensor, axes: Mapping[int, str], generator: torch.Generator) -> Tensor:
    shape = [size + _GROWTH * (axis in axes) for axis, size in enumerate(example.shape)]
    if example.is_floating_point():
        return torch.rand(shape, generator=generator, dtype=example.dtype)
    return torch.randint(0, 256, shape, generator=generator, dtype=example.dtype)


def as_list(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
