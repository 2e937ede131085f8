"""The latency of any configuration on one device, predicted from a table of its layers.

A few networks of very different widths are timed whole, as they are deployed: a runtime merges
layers, so the times of single layers do not add up. What a channel and a multiply-add of each
layer take is then fitted to these times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anywidth.distributed import device_name
from anywidth.errors import AnywidthError, errors_about
from anywidth.files import read_json, write_json
from anywidth.json_values import anything, listed, mapped, number, record, row, text, whole
from anywidth.measuring.deployed_latency import RUNTIME, deployed_latencies, runs_in_runtime
from anywidth.planning.groups import Plan
from anywidth.searching.latency_fit import BLOCKS, Terms, best_block, fit, layer_terms, predicted
from anywidth.searching.probes import PROBES, network_key, probe_configs, probe_number
from anywidth.slimming.state import state_of
from anywidth.width import ChannelConfig, check_whole

_VERSION = 3
_FEWEST = 8


@dataclass(frozen=True)
class LatencyTable:
    """Milliseconds of one forward pass of one example, for any configuration of one network.

    Args:
        device: the device it was measured on, and what ran the network there.
        network: tells the network it was measured with from others.
        constant: milliseconds that every configuration takes.
        block: a layer whose numbers of channels are no multiples of this is slower; 1 if all
            numbers are alike.
        layers: per layer, the milliseconds of a channel that it makes and of a multiply-add, and
            what is added to both if it is not in blocks.
        error: median relative error over networks that took no part in fitting.
    """

    device: str
    network: str
    constant: float
    block: int
    layers: dict[str, Terms]
    error: float
    _plan: Plan

    def predict(self, config: ChannelConfig) -> float:
        """Milliseconds at a configuration."""
        terms = layer_terms(self._plan, config, self.block)
        return predicted(self.constant, self.layers, terms)

    def is_of(self, model: nn.Module) -> bool:
        """Whether it was measured on the device that a network is on."""
        return self.device in latency_devices(model)

    def check_plan(self, plan: Plan) -> None:
        """A clear error if the table was measured with another network."""
        if network_key(plan) != self.network:
            raise AnywidthError(
                "this latency table was measured with another network, other widths or another "
                "input shape; measure this network: anywidth.measure_latencies(model), or "
                "`anywidth search` without --latencies"
            )

    def save(self, path: str | Path) -> None:
        """Writes the table as JSON."""
        data = {name: value for name, value in vars(self).items() if name != "_plan"}
        write_json(Path(path), {"version": _VERSION, **data})

    @staticmethod
    def load(path: str | Path, model: nn.Module, *, other_device: bool = False) -> LatencyTable:
        """Reads a table, or the times of probes that `anywidth_runtime` measured.

        Args:
            path: what `save` wrote, or `NAME.anywidth.latency.json`.
            model: the network that it must have been measured with.
            other_device: allow a table of another device than the one this network is on.
        """
        path, plan = Path(path), state_of(model).plan
        data = read_json(path)
        with errors_about(path):
            table = _from_probes(data, plan) if "milliseconds" in data else _from_json(data, plan)
        if not other_device and not table.is_of(model):
            raise AnywidthError(
                f"{path}: measured on {table.device!r}, and this is {latency_devices(model)[0]!r}; "
                "measure again here, or, if the network is for that device, allow it with "
                "other_device=True (--other-device)"
            )
        return table


def measure_latencies(
    model: nn.Module, *, networks: int = PROBES, progress: bool = True
) -> LatencyTable:
    """Measures a latency table of a converted network on the device it is on.

    The network is not changed. On a CPU, anywidth-runtime runs it if that is installed, as
    `anywidth.spectrum` does. The table's `error` comes from five fits, each of which leaves out a
    fifth of the networks.

    Args:
        model: a converted network.
        networks: how many networks of very different widths are timed.
        progress: show how far it has come (if rich is installed).

    Example:
        >>> table = anywidth.measure_latencies(model)
        >>> table.predict(anywidth.plan_of(model).resolve(0.5))  # milliseconds
    """
    check_whole(networks, _FEWEST, "measure_latencies(): networks")
    plan = state_of(model).plan
    configs = probe_configs(plan, networks)
    timed = deployed_latencies(model, configs, progress)
    return fitted_table(plan, timed.milliseconds, _device_name(model, timed.by == RUNTIME))


def latency_devices(model: nn.Module) -> list[str]:
    """The device that latencies of a network are measured on, by what may run it there."""
    return [_device_name(model, one) for one in (True, False) if not one or runs_in_runtime(model)]


def measured_finalists(
    model: nn.Module, configs: Sequence[ChannelConfig], table: LatencyTable
) -> dict[ChannelConfig, float] | None:
    """Milliseconds, measured as the table was; None if that cannot be done here."""
    if not table.is_of(model):
        return None
    timed = deployed_latencies(model, configs, False)
    is_alike = _device_name(model, timed.by == RUNTIME) == table.device
    return timed.milliseconds if is_alike else None


def fitted_table(plan: Plan, times: Mapping[ChannelConfig, float], device: str) -> LatencyTable:
    """A table from the milliseconds of some configurations."""
    configs = list(times)
    if len(configs) < _FEWEST or not all(0 < ms < math.inf for ms in times.values()):
        raise AnywidthError(
            f"{len(configs)} different networks were timed; a latency table needs at least "
            f"{_FEWEST}, with times above 0"
        )
    block, errors = best_block(plan, times)
    constant, layers = fit(plan, times, block)
    error = statistics.median(errors)
    return LatencyTable(device, network_key(plan), constant, block, layers, error, plan)


_TABLE = record(
    {
        "version": whole(_VERSION, _VERSION),
        "device": text,
        "network": text,
        "constant": number,
        "block": whole(1),
        "layers": mapped(row(number, number, number, number)),
        "error": number,
    }
)
_PROBE_TIMES = listed(row(anything, number))
_MACHINE = record({"processor": text, "cores": text, "threads": text, RUNTIME: text})


def _from_json(data: Mapping[str, Any], plan: Plan) -> LatencyTable:
    with errors_about("not a latency table"):
        fields = _TABLE(data, "")
        del fields["version"]
        table = LatencyTable(**fields, _plan=plan)
        if table.block not in BLOCKS:
            raise AnywidthError(f"block {table.block}: expected one of {BLOCKS}")
    table.check_plan(plan)
    if table.layers.keys() != layer_terms(plan, plan.full, table.block).keys():
        raise AnywidthError("not a latency table: its layers are not those of the network")
    return table


def _from_probes(data: Mapping[str, Any], plan: Plan) -> LatencyTable:
    """From what `anywidth_runtime measure` keeps beside a file of probes."""
    with errors_about("not the times of probes"):
        machine = _MACHINE(data.get("machine"), "machine")
        times = _PROBE_TIMES(data["milliseconds"], "milliseconds")
        numbered = [(*probe_number(name), ms) for name, ms in times]
    if {key for _, key, _ in numbered} != {network_key(plan)}:
        raise AnywidthError(
            "these are times of another network, other widths, another input shape or an older "
            "anywidth; write probes of this network with `anywidth search RUN --probes`"
        )
    if not all(0 <= number < 10_000 for number, _, _ in numbered):
        raise AnywidthError("not the times of probes: a probe's number is out of range")
    configs = probe_configs(plan, 1 + max(number for number, _, _ in numbered))
    by_config = {configs[number]: ms for number, _, ms in sorted(numbered)}
    return fitted_table(plan, by_config, _machine_name(machine))


def _device_name(model: nn.Module, in_runtime: bool) -> str:
    if in_runtime:
        from anywidth_runtime.latency import this_machine

        return _machine_name(this_machine(threads=1))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return f"{device_name(device)}, PyTorch"


def _machine_name(machine: Mapping[str, Any]) -> str:
    return f"{machine['processor']}, threads {machine['threads']}, {RUNTIME} {machine[RUNTIME]}"
