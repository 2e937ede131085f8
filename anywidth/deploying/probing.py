"""A file of probes: networks to time on another machine, which only needs the runtime."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from anywidth.deploying.bundling import Name, write_bundle
from anywidth.searching.probes import PROBES, probe_configs, probe_name
from anywidth.slimming.norm_statistics import uncalibrated_allowed
from anywidth.slimming.state import state_of
from anywidth.translating.called_network import described
from anywidth.width import Width


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
