"""One file, every width: weights once, and per width a small graph that says how to cut them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anywidth._version import __version__
from anywidth.deploying.exporting import Deployment, largest_difference, to_onnx
from anywidth.deploying.shared_weights import Match, match, sources
from anywidth.errors import AnywidthError
from anywidth.measuring.cost import macs, parameter_count
from anywidth.planning.trace.exported_graphs import quiet
from anywidth.slimming.extraction import extract
from anywidth.slimming.state import state_of
from anywidth.slimming.trial import example_inputs
from anywidth.width import ChannelConfig, Width, width_list

# Where graphs say their weights are; the runtime hands them over.
_LOCATION = "weights"
_TOLERANCE = 1e-3

Deploy = Callable[[Width], Deployment]


@dataclass(frozen=True)
class Quality:
    """What was measured of the network at one width.

    `accuracy` is the main number, larger is better.
    """

    metrics: Mapping[str, float]
    accuracy: float | None


@dataclass(frozen=True)
class Variant:
    """One configuration as a file holds it."""

    graph: bytes
    matches: Mapping[str, Match]


def export_bundle(
    model: nn.Module,
    path: str | Path,
    widths: Sequence[Width] | Mapping[str, Width],
    *,
    example_input: Any = None,
    output_names: Sequence[str] = ("output",),
    progress: bool = True,
) -> None:
    """Writes a converted network at many widths to one file, which `anywidth_runtime` opens.

    All weights are in the file once; per width there is a small graph, the norms merged, and how
    the weights are cut. The file is read back and compared with the network at every width
    before it counts as written.

    Args:
        model: a converted network on the CPU, calibrated at these widths.
        path: the file; its folder must exist, and a file there is replaced.
        widths: fractions of the full width or `ChannelConfig`s; a mapping names them.
        example_input: as for `anywidth.plan`; the plan's if not given.
        output_names: what the file calls the outputs.
        progress: show how far it has come (where rich is installed).

    Example:
        >>> anywidth.calibrate(model, loader, widths=[0.25, 0.5, 1.0])
        >>> anywidth.export_bundle(model, "net.anywidth", [0.25, 0.5, 1.0])
        >>> anywidth_runtime.open("net.anywidth").run(images, width=0.5)
    """
    examples = example_inputs(model, state_of(model).plan, example_input)

    def deploy(width: Width) -> Deployment:
        return Deployment(
            extract(model, width, fold=True),
            examples,
            "the network's own inputs",
            tuple(f"input_{i}" if i else "input" for i in range(len(examples))),
            tuple(output_names),
            tuple({0: "batch"} for _ in examples),
            {},
        )

    write_bundle(model, Path(path), _named(model, widths), deploy)


def _named(
    model: nn.Module, widths: Sequence[Width] | Mapping[str, Width]
) -> dict[float | str, Width]:
    """Widths by what a caller of the file will ask for; nonuniform ones are numbered."""
    if isinstance(widths, Mapping):
        width_list(widths.values(), "export_bundle")
        return {str(name): width for name, width in widths.items()}
    state = state_of(model)
    named: dict[float | str, Width] = {}
    for width in width_list(widths, "export_bundle"):
        if isinstance(width, ChannelConfig):
            number = sum(isinstance(name, str) for name in named) + 1
            named[f"nonuniform {number}"] = width
        else:
            named[round(state.plan.widths.fraction(width), 6)] = width
    return named


def write_bundle(
    model: nn.Module,
    path: Path,
    widths: Mapping[float | str, Width],
    deploy: Deploy,
    qualities: Mapping[float | str, Quality] | None = None,
) -> float:
    """Writes a bundle, and returns how far it is off; see `export_bundle`.

    Args:
        widths: name → width.
        deploy: the network at one width, ready to be called.
        qualities: what was measured, by the same names.
    """
    from anywidth.files import temporary_path, write_atomically

    runtime = _runtime()
    state = state_of(model)
    configs = {name: state.resolve(width) for name, width in widths.items()}
    order = sorted(configs, key=lambda name: (macs(model, configs[name]), str(name)))
    variants: dict[ChannelConfig, Variant] = {}
    deployments: dict[ChannelConfig, Deployment] = {}
    for name in order:
        if configs[name] not in variants:
            deployment = deploy(widths[name])
            variants[configs[name]] = _variant(model, configs[name], deployment)
            deployments[configs[name]] = deployment
    numbers = {config: number for number, config in enumerate(variants)}
    rows = [
        _row(model, name, configs[name], numbers[configs[name]], (qualities or {}).get(name))
        for name in order
    ]
    about = _about(next(iter(deployments.values())), rows)
    content = runtime.bundle_file.encode_bundle(_tensors(list(variants.values())), about)
    temporary = temporary_path(path)
    try:
        temporary.write_bytes(content)
        network = runtime.open(temporary)
        worst = 0.0
        for name in order:
            deployment = deployments[configs[name]]

            def run(*values: Tensor, name: float | str = name) -> list[Tensor]:
                found = network.run(*[value.numpy() for value in values], width=name)
                arrays = found.values() if isinstance(found, dict) else [found]
                return [torch.as_tensor(array) for array in arrays]

            difference = largest_difference(deployment, run)
            if not difference < _TOLERANCE:
                raise AnywidthError(
                    f"{path}: at width {name} the file differs by {difference:.2g} of the largest "
                    f"output from the network itself; expected less than {_TOLERANCE:g}, so it "
                    "was not written"
                )
            worst = max(worst, difference)
    finally:
        temporary.unlink(missing_ok=True)
    write_atomically(path, content)
    return worst


def _variant(model: nn.Module, config: ChannelConfig, deployment: Deployment) -> Variant:
    from onnx import numpy_helper

    with quiet():
        proto = to_onnx(deployment)
    candidates = sources(model, state_of(model).plan, config)
    matches = {}
    for tensor in proto.graph.initializer:
        found = match(tensor.name, numpy_helper.to_array(tensor), candidates)
        if found is not None:
            matches[tensor.name] = found
            tensor.ClearField("raw_data")
            tensor.data_location = tensor.EXTERNAL
            entry = tensor.external_data.add()
            entry.key, entry.value = "location", _LOCATION
    _strip(proto)
    return Variant(proto.SerializeToString(), matches)


def _strip(proto: Any) -> None:
    """Leaves out where in the Python code each node came from: most of the graph's bytes."""
    del proto.metadata_props[:]
    _strip_graph(proto.graph)


def _strip_graph(graph: Any) -> None:
    del graph.value_info[:]
    del graph.metadata_props[:]
    for one in (*graph.input, *graph.output, *graph.initializer):
        del one.metadata_props[:]
        one.ClearField("doc_string")
    for node in graph.node:
        del node.metadata_props[:]
        node.ClearField("doc_string")
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _strip_graph(inner)


def _tensors(variants: Sequence[Variant]) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for number, variant in enumerate(variants):
        pieces, scales, start = {}, [], 0
        for name, found in variant.matches.items():
            tensors[f"weight/{found.source.name}"] = found.source.whole
            pieces[name] = found.to_json(start)
            if found.scale is not None:
                scales.append(found.scale)
                start += len(found.scale)
        tensors[f"graph/{number}"] = _as_bytes(variant.graph)
        tensors[f"pieces/{number}"] = _as_bytes(json.dumps(pieces, separators=(",", ":")).encode())
        tensors[f"scales/{number}"] = np.concatenate([*scales, np.zeros(0, np.float32)])
    return tensors


def _as_bytes(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def _row(
    model: nn.Module,
    name: float | str,
    config: ChannelConfig,
    variant: int,
    quality: Quality | None,
) -> dict[str, Any]:
    return {
        "width": name,
        "variant": variant,
        "macs": macs(model, config),
        "parameters": parameter_count(model, config),
        "metrics": {} if quality is None else dict(quality.metrics),
        "accuracy": None if quality is None else quality.accuracy,
        "latency_ms": None,
    }


def _about(deployment: Deployment, rows: list[dict[str, Any]]) -> dict[str, Any]:
    inputs = [
        {
            "name": name,
            "dtype": _dtype(example),
            "shape": [axes.get(axis, size) for axis, size in enumerate(example.shape)],
            "example": [1 if 0 in axes else len(example), *example.shape[1:]],
        }
        for name, example, axes in zip(
            deployment.input_names, deployment.examples, deployment.free_axes, strict=True
        )
    ]
    with torch.no_grad():
        given = tree_leaves(deployment.network(*deployment.examples))
    outputs = [
        {"name": name, "dtype": _dtype(one), "shape": ["batch", *one.shape[1:]], "example": []}
        for name, one in zip(deployment.output_names, given, strict=True)
    ]
    facts = dict(deployment.facts)
    return {
        "written_by": f"anywidth {__version__}",
        "task": deployment.task,
        "takes": deployment.takes,
        "classes": json.loads(facts.pop("classes", "null")),
        "facts": facts,
        "accuracy_name": None,
        "inputs": inputs,
        "outputs": outputs,
        "widths": rows,
        "machine": {},
    }


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _runtime() -> Any:
    try:
        return importlib.import_module("anywidth_runtime")
    except ModuleNotFoundError as error:
        raise AnywidthError(
            f"a bundle is checked with the package {error.name!r}; install it with: "
            "pip install anywidth-runtime"
        ) from error
