"""Latency of any configuration on one device, foretold from a table of its layers.

Every convolution and linear layer is timed inside a few extracted networks of random widths. Its
time is then a + b·inputs + c·outputs + d·inputs·outputs, fitted per layer; what is left of a whole
pass (activations, pooling, Python) is fitted to the number of channels.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.distributed import device_name
from anywidth.errors import AnywidthError
from anywidth.measuring.shown_progress import tracked_if_shown
from anywidth.modes import evaluating
from anywidth.planning.example_inputs import example_inputs
from anywidth.planning.groups import Plan
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.state import state_of
from anywidth.width import ChannelConfig

_VERSION = 1
_Terms = tuple[float, ...]


@dataclass(frozen=True)
class LatencyTable:
    """Milliseconds of one forward pass of one example, for any configuration of one network.

    Args:
        device: the device it was measured on.
        network: tells the network it was measured with from others.
        layers: the fitted terms of each layer.
        remainder: the fitted terms of everything that is no layer.
        error: median relative error over configurations that took no part in fitting.
    """

    device: str
    network: str
    layers: dict[str, _Terms]
    remainder: _Terms
    error: float
    _plan: Plan

    def predict(self, config: ChannelConfig) -> float:
        """Milliseconds at a configuration."""
        layers = sum(
            max(0.0, _dot(terms, _layer_features(self._plan, name, config)))
            for name, terms in self.layers.items()
        )
        rest = _dot(self.remainder, _network_features(self._plan, config))
        return max(layers + rest, 1e-6)

    def check_plan(self, plan: Plan) -> None:
        """A clear error if the table was measured with another network."""
        if network_key(plan) != self.network:
            raise AnywidthError(
                "the latency table was measured with another network (or another input shape); "
                "measure this one with anywidth.measure_latencies(model)"
            )

    def save(self, path: str | Path) -> None:
        """Writes the table as JSON."""
        from anywidth.files import write_json

        data = {name: getattr(self, name) for name in ("device", "network", "layers", "remainder",
                                                       "error")}  # fmt: skip
        write_json(Path(path), {"version": _VERSION, **data})

    @staticmethod
    def load(path: str | Path, model: nn.Module) -> LatencyTable:
        """Reads a table; it must be of this network and of the device the network is on."""
        from anywidth.files import read_json

        path, plan = Path(path), state_of(model).plan
        data = read_json(path)
        try:
            if data["version"] != _VERSION:
                raise ValueError(f"version {data['version']!r}")
            layers = {str(name): _terms(terms, 4) for name, terms in data["layers"].items()}
            table = LatencyTable(
                str(data["device"]),
                str(data["network"]),
                layers,
                _terms(data["remainder"], 2),
                float(data["error"]),
                plan,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AnywidthError(f"{path}: not a latency table ({error})") from error
        table.check_plan(plan)
        here = device_name(_device(model))
        if table.device != here:
            raise AnywidthError(
                f"{path}: measured on {table.device!r}, and the network is on {here!r}; measure "
                "again here with anywidth.measure_latencies(model)"
            )
        return table


def measure_latencies(
    model: nn.Module, *, networks: int = 24, passes: int = 8, seed: int = 0, progress: bool = True
) -> LatencyTable:
    """Measures a latency table of a converted network on the device it is on.

    The network is not changed. A fifth of the networks that are timed take no part in fitting;
    they give the table's `error`.

    Args:
        model: a converted network.
        networks: how many extracted networks of random widths are timed.
        passes: how often each runs; the fastest third counts.
        seed: decides which widths are timed.
        progress: show how far it has come (if rich is installed).

    Example:
        >>> table = anywidth.measure_latencies(model)
        >>> table.predict(anywidth.plan_of(model).resolve(0.5))  # milliseconds
    """
    if networks < 10 or passes < 3:
        raise AnywidthError(
            f"measure_latencies(networks={networks!r}, passes={passes!r}): expected at least 10 "
            "networks and 3 passes"
        )
    plan = state_of(model).plan
    configs = _profiled(plan, networks, random.Random(seed))
    inputs = [
        x[:1] if isinstance(x, Tensor) and x.dim() else x for x in example_inputs(model, plan)
    ]
    # The networks take turns, so that what else the machine does falls on all of them.
    small = [extract_quietly(model, config, fold=True).eval() for config in configs]
    turns = tracked_if_shown(range(passes), "timing layers", progress)
    rounds = [_timed_round(small, inputs, plan) for _ in turns]
    totals = [_fast([one[i][0] for one in rounds[1:]]) for i in range(networks)]
    layers = [
        {name: _fast([one[i][1][name] for one in rounds[1:]]) for name in rounds[0][i][1]}
        for i in range(networks)
    ]
    checked = range(4, networks, 5)
    fitted = [i for i in range(networks) if i not in checked]
    names = [name for name in plan.outputs if all(name in one for one in layers)]
    table_layers = {
        name: _fit(
            [_layer_features(plan, name, configs[i]) for i in fitted],
            [layers[i][name] for i in fitted],
        )
        for name in names
    }
    found = LatencyTable(
        device_name(_device(model)), network_key(plan), table_layers, (0.0, 0.0), math.nan, plan
    )
    remainder = _fit(
        [_network_features(plan, configs[i]) for i in fitted],
        [totals[i] - found.predict(configs[i]) for i in fitted],
    )
    found = LatencyTable(found.device, found.network, table_layers, remainder, math.nan, plan)
    errors = [abs(found.predict(configs[i]) / totals[i] - 1) for i in checked]
    return LatencyTable(
        found.device, found.network, table_layers, remainder, statistics.median(errors), plan
    )


def network_key(plan: Plan) -> str:
    """Tells networks apart whose latencies may differ: their shapes and their input."""
    shapes = {name: list(shape) for name, shape in plan.shapes.items()}
    text = json.dumps([shapes, [str(example) for example in plan.example]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _profiled(plan: Plan, count: int, chance: random.Random) -> list[ChannelConfig]:
    """The two ends, then random widths, uniform and not in turn."""
    low, high = plan.widths.low, plan.widths.high
    found = [plan.widest, plan.narrowest]
    while len(found) < count:
        if len(found) % 3 == 0:
            found.append(plan.resolve(chance.uniform(low, high)))
        else:
            fractions = {group.name: chance.uniform(low, high) for group in plan.elastic()}
            found.append(plan.resolve(fractions))
    return found


def _timed_round(
    networks: Sequence[nn.Module], inputs: list[Any], plan: Plan
) -> list[tuple[float, dict[str, float]]]:
    """For each network, the milliseconds of one pass, and of each layer in another pass."""
    rows = []
    for network in networks:
        with evaluating(network), torch.no_grad():
            total = _milliseconds(lambda network=network: network(*inputs), inputs)
            rows.append((total, _layer_times(network, inputs, plan)))
    return rows


def _layer_times(network: nn.Module, inputs: list[Any], plan: Plan) -> dict[str, float]:
    times: dict[str, float] = {}
    starts: dict[str, float] = {}
    hooks = []
    for name in plan.outputs:
        layer = network.get_submodule(name)

        def before(module: nn.Module, arguments: Any, name: str = name) -> None:
            _synchronize(inputs)
            starts[name] = time.perf_counter()

        def after(module: nn.Module, arguments: Any, output: Any, name: str = name) -> None:
            _synchronize(inputs)
            spent = 1000 * (time.perf_counter() - starts[name])
            times[name] = times.get(name, 0.0) + spent

        hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        network(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return times


def _milliseconds(run: Any, inputs: list[Any]) -> float:
    _synchronize(inputs)
    start = time.perf_counter()
    run()
    _synchronize(inputs)
    return 1000 * (time.perf_counter() - start)


def _synchronize(inputs: Iterable[Any]) -> None:
    if any(isinstance(x, Tensor) and x.is_cuda for x in inputs):
        torch.cuda.synchronize()


def _fast(times: Sequence[float]) -> float:
    """The mean of the fastest third: what the device takes if nothing else runs on it."""
    best = sorted(times)[: max(1, len(times) // 3)]
    return statistics.fmean(best)


def _fit(features: Sequence[Sequence[float]], values: Sequence[float]) -> _Terms:
    """Least squares of the relative error, with a light pull towards zero."""
    x = torch.tensor(features, dtype=torch.float64)
    y = torch.tensor(values, dtype=torch.float64)
    weights = 1 / y.abs().clamp(min=float(y.abs().mean()) / 10)
    scale = x.abs().amax(0).clamp(min=1e-12)
    weighted = x / scale * weights[:, None]
    pull = 1e-6 * torch.eye(x.shape[1], dtype=torch.float64)
    solved = torch.linalg.solve(weighted.T @ weighted + pull, weighted.T @ (y * weights))
    return tuple((solved / scale).tolist())


def _layer_features(plan: Plan, layer: str, config: ChannelConfig) -> tuple[float, ...]:
    axes = plan.tensors.get(f"{layer}.weight") or (None, None)
    shape = plan.shapes.get(f"{layer}.weight") or (1, 1)
    sizes = [
        float(full if axis is None else plan.axis_size(axis, config))
        for axis, full in zip(axes[:2], shape[:2], strict=True)
    ]
    made, read = sizes if len(sizes) == 2 else (1.0, 1.0)
    return 1.0, read, made, read * made


def _network_features(plan: Plan, config: ChannelConfig) -> tuple[float, ...]:
    made = sum(plan.axis_size(axis, config) for axis in plan.outputs.values() if axis is not None)
    return 1.0, float(made)


def _dot(terms: Sequence[float], features: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(terms, features, strict=True))


def _terms(values: Any, count: int) -> _Terms:
    terms = tuple(float(value) for value in values)
    if len(terms) != count or not all(map(math.isfinite, terms)):
        raise ValueError(f"{count} finite numbers expected, not {values!r}")
    return terms


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
