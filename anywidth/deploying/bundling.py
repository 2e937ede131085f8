"""A bundle: one file with all weights once, and per width a graph and how to cut its weights."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anywidth._version import __version__
from anywidth.deploying.width_graphs import WidthGraph, largest_error, width_graphs
from anywidth.errors import packages_for
from anywidth.files import errors_that_name, temporary_path, write_atomically
from anywidth.measuring.cost import macs, parameter_count
from anywidth.measuring.heartbeat import working
from anywidth.measuring.spectra import Spectrum, check_statistics
from anywidth.planning.modes import evaluating
from anywidth.searching.probes import PROBES, probe_configs, probe_name
from anywidth.slimming.norm_statistics import uncalibrated_allowed
from anywidth.slimming.state import state_of
from anywidth.translating.called_network import described
from anywidth.translating.deployment import Deployment, Runner
from anywidth.width import ChannelConfig, Width, width_list

Name = float | str
"""How a caller of the file names a width: a fraction, or the name of a configuration."""


def export_bundle(
    model: nn.Module,
    path: str | Path,
    widths: Sequence[Width] | Mapping[str, Width],
    *,
    example_input: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    spectrum: Spectrum | None = None,
    facts: Mapping[str, str] | None = None,
    measure_latency: bool = True,
    progress: bool = True,
) -> None:
    """Write a converted network at many widths to one file, which `anywidth_runtime` opens.

    All weights are in the file once. Per width there is a small graph with folded norms, and a
    description of how its weights are cut from the full ones. The file is read back and compared
    with the network at every width before it is kept. Needs the packages onnx, onnxscript and
    anywidth-runtime.

    Args:
        model: a converted network on the CPU, calibrated at these widths; it is not changed.
        path: the file; its folder must exist. An existing file is replaced.
        widths: fractions of the full width or `ChannelConfig`s. A mapping gives them names;
            otherwise nonuniform ones are called "nonuniform 1", "nonuniform 2", ...
        example_input: a tensor or a tuple of arguments; the plan's if not given. If the network
            allows it, calls may have batches of any size.
        input_names: the names of the inputs in the file; by default those of `forward`'s arguments.
        output_names: the names of the outputs in the file; by default "output".
        wrap: returns a module around the network, with steps that belong into the file too, such
            as the normalisation of images.
        spectrum: from `anywidth.spectrum`; its metrics are stored in the file's table.
        facts: name → text, stored in the file.
        measure_latency: time every width on this machine, with the runtime and one thread.
        progress: show the progress, if rich is installed.

    Example:
        >>> anywidth.calibrate(model, loader, widths=[0.25, 0.5, 1.0])
        >>> anywidth.export_bundle(model, "net.anywidth", [0.25, 0.5, 1.0])
        >>> anywidth_runtime.open("net.anywidth").run(images, width=0.5)
    """
    named = named_widths(model, widths)
    names = {"input_names": input_names, "output_names": output_names}
    deployment = described(model, example_input, **names, wrap=wrap, facts=facts)
    write_bundle(model, deployment, Path(path), named, spectrum, measure_latency, progress)


def named_widths(
    model: nn.Module, widths: Sequence[Width] | Mapping[str, Width]
) -> dict[Name, Width]:
    """Widths by the names that callers of the file use."""
    if isinstance(widths, Mapping):
        return dict(zip(widths, width_list(widths.values(), "export_bundle"), strict=True))
    fraction = state_of(model).plan.widths.fraction
    named: dict[Name, Width] = {}
    for width in width_list(widths, "export_bundle"):
        if isinstance(width, ChannelConfig):
            number = sum(isinstance(name, str) for name in named) + 1
            named[f"nonuniform {number}"] = width
        else:
            named[round(fraction(width), 6)] = width
    return named


def write_bundle(
    model: nn.Module,
    deployment: Deployment,
    path: Path,
    widths: Mapping[Name, Width],
    spectrum: Spectrum | None = None,
    measure_latency: bool = True,
    progress: bool = True,
) -> float:
    """Write a bundle and return its largest error, as `Deployment.check` does."""
    runtime = check_packages()
    check_statistics(model, list(widths.values()))
    with evaluating(model):
        configs = {name: state_of(model).resolve(width) for name, width in widths.items()}
        # The cheapest first, as in the file's table.
        order = sorted(configs, key=lambda name: (macs(model, configs[name]), str(name)))
        configs = {name: configs[name] for name in order}
        tensors, about = _parts(model, deployment, configs, spectrum, progress)
        if measure_latency:
            with (
                _opened(runtime, tensors, about, path) as network,
                working("timing widths", shown=progress),
            ):
                timed = network.measure(progress=False, keep=False)
            about["machine"] = runtime.latency.this_machine(threads=1)
            for row, now in zip(about["widths"], timed, strict=True):
                row["latency_ms"] = now.latency_ms
        with _opened(runtime, tensors, about, path) as network:
            runners = {name: (config, _runner(network, name)) for name, config in configs.items()}
            difference = largest_error(model, deployment, runners, path, progress)
    write_atomically(path, runtime.bundle_file.encode_bundle(tensors, about))
    return difference


def check_packages() -> Any:
    """Import the runtime; the error names a package that is missing."""
    with packages_for("a bundle", "'anywidth[onnx]' anywidth-runtime"):
        *_, runtime = map(importlib.import_module, ("onnx", "onnxscript", "anywidth_runtime"))
    return runtime


def _parts(
    model: nn.Module,
    deployment: Deployment,
    configs: Mapping[Name, ChannelConfig],
    spectrum: Spectrum | None,
    progress: bool,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and the description of a bundle; equal configurations share a graph."""
    numbers = {config: n for n, config in enumerate(dict.fromkeys(configs.values()))}
    graphs = width_graphs(model, list(numbers), deployment, progress)
    accuracy_name, measured = _measured(spectrum)
    rows = [
        {
            "width": name,
            "variant": numbers[config],
            "macs": macs(model, config),
            "parameters": parameter_count(model, config),
            **measured.get(config, {"metrics": {}, "accuracy": None}),
            "latency_ms": None,
        }
        for name, config in configs.items()
    ]
    facts = dict(deployment.facts)
    about = {
        "written_by": f"anywidth {__version__}",
        "task": deployment.task,
        "takes": deployment.takes,
        "classes": json.loads(facts.pop("classes", "null")),
        "facts": facts,
        "accuracy_name": accuracy_name,
        **described_tensors(deployment, graphs[0].proto.graph),
        "widths": rows,
        "machine": {},
    }
    return _tensors(graphs), about


def _tensors(graphs: Sequence[WidthGraph]) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for number, graph in enumerate(graphs):
        pieces: dict[str, Any] = {}
        scales = [np.zeros(0, np.float32)]
        for name, found in graph.matches.items():
            tensors[f"weight/{found.source.name}"] = found.source.whole
            pieces[name] = found.to_json(scale_start=sum(map(len, scales)))
            if found.scale is not None:
                scales.append(found.scale)
        text = json.dumps(pieces, separators=(",", ":"))
        tensors[f"graph/{number}"] = np.frombuffer(graph.without_weights(), np.uint8)
        tensors[f"pieces/{number}"] = np.frombuffer(text.encode(), np.uint8)
        tensors[f"scales/{number}"] = np.concatenate(scales)
    return tensors


@contextlib.contextmanager
def _opened(
    runtime: Any, tensors: Mapping[str, np.ndarray], about: Mapping[str, Any], path: Path
) -> Iterator[Any]:
    """A bundle, read back from a temporary file beside `path`."""
    temporary = temporary_path(path)
    try:
        with errors_that_name(path):
            temporary.write_bytes(runtime.bundle_file.encode_bundle(tensors, about))
        yield runtime.open(temporary)
    finally:
        temporary.unlink(missing_ok=True)


def _runner(network: Any, name: Name) -> Runner:
    def run(*values: Tensor) -> list[Tensor]:
        found = network.run(*[value.numpy() for value in values], width=name)
        arrays = found.values() if isinstance(found, dict) else [found]
        return [torch.as_tensor(array) for array in arrays]

    return run


# An error in percent is shown as an accuracy.
_ERROR = "error"


def described_tensors(deployment: Deployment, graph: Any) -> dict[str, list[dict[str, Any]]]:
    """Name, type and shape of each input and output; latency is measured with one example."""
    from onnx.helper import tensor_dtype_to_np_dtype

    free: dict[str, str] = {}
    inputs = []
    given = zip(graph.input, deployment.examples, deployment.free_axes, strict=True)
    for one, example, names in given:
        for axis, name in names.items():
            free[one.type.tensor_type.shape.dim[axis].dim_param] = name
        sizes = [1 if axis == 0 and 0 in names else n for axis, n in enumerate(example.shape)]
        shape = [names.get(axis, size) for axis, size in enumerate(example.shape)]
        dtype = str(example.dtype).removeprefix("torch.")
        inputs.append({"name": one.name, "dtype": dtype, "shape": shape, "example": sizes})
    outputs = []
    for one in graph.output:
        kind = one.type.tensor_type
        # The name of a size that depends on the inputs is a formula of their sizes.
        shape = [free.get(n.dim_param, n.dim_param) or n.dim_value for n in kind.shape.dim]
        dtype = tensor_dtype_to_np_dtype(kind.elem_type).name
        outputs.append({"name": one.name, "dtype": dtype, "shape": shape, "example": []})
    return {"inputs": inputs, "outputs": outputs}


def _measured(
    spectrum: Spectrum | None,
) -> tuple[str | None, dict[ChannelConfig, dict[str, Any]]]:
    """The name of the main metric as one of which more is better, and what was measured."""
    if spectrum is None:
        return None, {}
    main = name = spectrum.metric()
    is_lower, is_error = spectrum.describe(main).lower_is_better, _ERROR in main
    if is_lower:
        name = main.replace(_ERROR, "accuracy") if is_error else f"-{main}"
    found: dict[ChannelConfig, dict[str, Any]] = {}
    for point in spectrum.points:
        value = point.metrics.get(main)
        if value is not None and is_lower:
            value = 100 - value if is_error else -value
        found.setdefault(point.channels, {"metrics": dict(point.metrics), "accuracy": value})
    return name, found


def write_probes(model: nn.Module, path: str | Path, networks: int = PROBES) -> None:
    """Write a bundle that `python -m anywidth_runtime measure` times.

    It writes the times beside the bundle, as `NAME.latency.json`; `LatencyTable.load` reads them.

    Args:
        model: a converted network on the CPU; it need not be calibrated.
        path: the file, which ends in `.anywidth`.
        networks: number of networks, with very different widths.
    """
    plan = state_of(model).plan
    named: dict[Name, Width] = {
        probe_name(plan, number): config
        for number, config in enumerate(probe_configs(plan, networks))
    }
    with uncalibrated_allowed(model):
        write_bundle(model, described(model), Path(path), named, measure_latency=False)
