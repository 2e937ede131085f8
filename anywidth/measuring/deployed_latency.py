"""How long each width takes where it is deployed: with anywidth-runtime, if that is installed."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from anywidth.distributed import device_name
from anywidth.measuring.cost import example_batch, macs, parameter_count, time_pass
from anywidth.measuring.shown_progress import progress_if_possible
from anywidth.planning.modes import evaluating
from anywidth.slimming.convert import at_width
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.norm_statistics import buffers_kept, uncalibrated_allowed
from anywidth.translating.called_network import described
from anywidth.translating.onnx_graphs import onnx_graphs
from anywidth.width import ChannelConfig

RUNTIME, PYTORCH = "onnxruntime", "PyTorch"
"""What measured a latency."""

_PACKAGES = ("anywidth_runtime", "onnx", "onnxscript")
# Parameters of extracted networks that are kept together while they take turns.
_MOST_AT_ONCE = 2**26
# Timed passes per width: a short pass is disturbed more often, and more of them cost little time.
_MANY, _FEW, _LARGE = 60, 20, 2e8
WARM_UP = 3


class Timing(NamedTuple):
    """Milliseconds of one pass, from many passes; the number to report is `milliseconds`."""

    milliseconds: float
    fastest: float
    median: float

    @staticmethod
    def of(times: Sequence[float]) -> Timing:
        """The mean of the fastest third: the time on a device that does nothing else."""
        best = sorted(times)[: max(1, len(times) // 3)]
        return Timing(statistics.fmean(best), best[0], statistics.median(times))


@dataclass(frozen=True)
class Latencies:
    """The time of one example per configuration, what ran it, and on which device."""

    timings: dict[ChannelConfig, Timing]
    by: str
    on: str

    @property
    def milliseconds(self) -> dict[ChannelConfig, float]:
        return {config: timing.milliseconds for config, timing in self.timings.items()}


def deployed_latencies(
    model: nn.Module, configs: Sequence[ChannelConfig], progress: bool
) -> Latencies:
    """Time one example per configuration; the configurations take turns.

    On a CPU with the packages installed, `anywidth_runtime` runs the network as a bundle would
    hold it. Otherwise, and if the network has no ONNX form, PyTorch runs it: on a CPU extracted and
    with its norms merged, on a GPU sliced.
    """
    # Converting a network counts as much as timing it.
    repeats = _FEW if max((macs(model, one) for one in configs), default=0) > _LARGE else _MANY
    total = 2 * repeats * len(configs)
    with progress_if_possible("timing widths", total, shown=progress) as update:
        done = 0

        def advance(steps: int = 1) -> None:
            nonlocal done
            done += steps
            update(done)

        if runs_in_runtime(model):
            try:
                return _timed_by_runtime(model, configs, repeats, advance)
            except Exception:  # converters have no common class of errors
                done = 0
        timed = _timed_by_pytorch(model, configs, repeats, advance)
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    return Latencies(timed, PYTORCH, device_name(device))


def runs_in_runtime(model: nn.Module) -> bool:
    """Whether the packages are here, and the network on a CPU; it may still have no ONNX form."""
    return _is_on_cpu(model) and all(importlib.util.find_spec(name) for name in _PACKAGES)


def _is_on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def _timed_by_runtime(
    model: nn.Module, configs: Sequence[ChannelConfig], repeats: int, advance: Callable[..., None]
) -> Latencies:
    from anywidth_runtime.latency import this_machine, time_graphs

    with buffers_kept(model), uncalibrated_allowed(model):
        deployment = described(model)
        inputs = zip(deployment.input_names, deployment.examples, deployment.free_axes, strict=True)
        feeds = {name: (x[:1] if 0 in free else x).numpy() for name, x, free in inputs}

        def graphs() -> Iterator[bytes]:
            for proto in onnx_graphs(model, configs, deployment):
                yield bytes(proto.SerializeToString())
                advance(repeats)

        times = time_graphs(graphs(), feeds, repeats, advance)
    timings = {c: Timing.of(found) for c, found in zip(configs, times, strict=True)}
    return Latencies(timings, RUNTIME, f"{this_machine(1)['processor']}, 1 thread")


def _timed_by_pytorch(
    model: nn.Module, configs: Sequence[ChannelConfig], repeats: int, advance: Callable[..., None]
) -> dict[ChannelConfig, Timing]:
    """Extracted networks, of which as many as fit into memory take turns; on a GPU sliced ones."""
    inputs, is_sliced = example_batch(model), not _is_on_cpu(model)

    def sliced_pass(config: ChannelConfig) -> float:
        with at_width(model, config):
            return time_pass(model, inputs)

    def prepared(config: ChannelConfig) -> Callable[[], float]:
        if is_sliced:
            sliced_pass(config)  # a GPU prepares every new shape
            return partial(sliced_pass, config)
        return partial(time_pass, extract_quietly(model, config, fold=True).eval(), inputs)

    timings: dict[ChannelConfig, Timing] = {}
    with evaluating(model), buffers_kept(model), uncalibrated_allowed(model), torch.no_grad():
        for group in [configs] if is_sliced else _grouped(model, configs):
            passes = []
            for config in group:
                passes.append(prepared(config))
                advance(repeats)
            times = time_in_turns(passes, advance, repeats)
            timings |= {c: Timing.of(found) for c, found in zip(group, times, strict=True)}
    return timings


def _grouped(model: nn.Module, configs: Sequence[ChannelConfig]) -> list[list[ChannelConfig]]:
    groups: list[list[ChannelConfig]] = [[]]
    size = 0
    for config in configs:
        parameters = parameter_count(model, config)
        if groups[-1] and size + parameters > _MOST_AT_ONCE:
            groups.append([])
            size = 0
        groups[-1].append(config)
        size += parameters
    return groups


def time_in_turns(
    passes: Sequence[Callable[[], float]], advance: Callable[[], None], repeats: int
) -> list[list[float]]:
    """Milliseconds of each repeat, per network.

    Every network runs once before any runs again, so that a busy moment of the machine slows one
    pass of each and not all passes of one. A function in `passes` runs one pass of its network and
    returns its milliseconds; `advance` is called after each timed pass.
    """
    for one in passes:
        for _ in range(WARM_UP):
            one()
    times: list[list[float]] = [[] for _ in passes]
    for _ in range(repeats):
        for found, one in zip(times, passes, strict=True):
            found.append(one())
            advance()
    return times
