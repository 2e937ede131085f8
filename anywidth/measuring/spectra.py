"""Spectra: the metrics and the cost of a network at many widths."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anywidth.json_values as values
from anywidth.errors import AnywidthError, errors_about
from anywidth.files import write_atomically
from anywidth.measuring.cost import macs, parameter_count
from anywidth.measuring.deployed_latency import Latencies, deployed_latencies
from anywidth.measuring.shown_progress import tracked_if_shown
from anywidth.planning.modes import evaluating
from anywidth.slimming.convert import at_width
from anywidth.slimming.norm_statistics import norm_records
from anywidth.slimming.state import state_of
from anywidth.width import ChannelConfig, Width, width_list

STANDARD_ERROR = "_standard_error"
"""Ending of the metric that holds the standard error of another metric."""

KINDS = ("us", "s", "i", "control")
"""Universally slimmable, slimmable, individually trained, and an ordinary network sliced."""

_VERSION = 1
_COST_COLUMNS = ("width", "macs", "parameters")
# The fields of a spectrum that a file keeps beside its points.
_KEPT = {
    "name": values.text,
    "kind": values.text,
    "measured_on": values.text,
    "latency_by": values.optional(values.text),
    "latency_on": values.optional(values.text),
}


@dataclass(frozen=True)
class Metric:
    """How a metric is shown.

    Args:
        label: its name on an axis, with its unit.
        decimals: it is printed with; None goes by the value's size.
        lower_is_better: which way is better.
    """

    label: str
    decimals: int | None = None
    lower_is_better: bool = False


@dataclass(frozen=True)
class SpectrumPoint:
    """One width of a spectrum.

    Args:
        width: the fraction of the full width; None for a nonuniform configuration.
        channels: the configuration.
        macs: multiply-adds of one example.
        parameters: number of parameters at this width.
        metrics: returned by `evaluate`, e.g. `{"top1_error": 8.1, "loss": 0.31}`.
        latency_ms: of a forward pass of one example, see `spectrum`; None if not measured.
        latency_range: its fastest and its median pass, in milliseconds.
    """

    width: float | None
    channels: ChannelConfig
    macs: int
    parameters: int
    metrics: dict[str, float]
    latency_ms: float | None = None
    latency_range: tuple[float, float] | None = None

    def is_at(self, width: Width) -> bool:
        if isinstance(width, ChannelConfig):
            return self.channels == width
        return self.width is not None and abs(self.width - width) < 1e-9


@dataclass(frozen=True)
class Spectrum:
    """A network at many widths: a table, a CSV file, a line in a plot.

    Args:
        name: the label in plots and tables.
        points: the widths, in the order they were given.
        kind: "us", "s", "i" or "control"; decides how a plot draws it.
        described: name of a metric → how it is shown. Files do not keep it.
        latency_by: what ran the network for the latency: "onnxruntime" or "PyTorch"; None if it was
            not measured, and in files of older versions.
        latency_on: the device that ran it, and its number of threads; None like `latency_by`.
        measured_on: the data of the metrics, such as "2,000 test images of CIFAR-10".
    """

    name: str
    points: tuple[SpectrumPoint, ...]
    kind: str = "us"
    described: Mapping[str, Metric] = field(default_factory=dict, compare=False)
    latency_by: str | None = None
    latency_on: str | None = None
    measured_on: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise AnywidthError(f"spectrum of kind {self.kind!r}: expected one of {KINDS}")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics, in order of first appearance; the first is the main one."""
        return tuple(dict.fromkeys(name for point in self.points for name in point.metrics))

    def metric(self, name: str | None = None) -> str:
        """`name`, if the spectrum has it; the main metric if no name is given."""
        if not self.metrics:
            raise AnywidthError(f"the spectrum {self.name!r} has no metrics: evaluate it first")
        if name is not None and name not in self.metrics:
            raise AnywidthError(
                f"no metric {name!r} in the spectrum {self.name!r}: it has {list(self.metrics)}"
            )
        return name or self.metrics[0]

    def describe(self, metric: str) -> Metric:
        """How a metric is shown; `psnr_Set5` as `psnr`, with the rest of its name."""
        if metric in self.described:
            return self.described[metric]
        for known, found in self.described.items():
            if metric.startswith(f"{known}_"):
                return replace(found, label=f"{found.label}, {metric[len(known) + 1 :]}")
        return undescribed(metric)

    def best(self, metric: str | None = None) -> SpectrumPoint:
        """The point with the best value of a metric; of two equal points the cheaper one."""
        metric = self.metric(metric)
        sign = 1 if self.describe(metric).lower_is_better else -1
        known = [p for p in self.points if not math.isnan(p.metrics.get(metric, math.nan))]
        if not known:
            raise AnywidthError(f"{metric!r} is NaN at every width of {self.name!r}")
        return min(known, key=lambda point: (sign * point.metrics[metric], point.macs))

    def at(self, width: Width) -> SpectrumPoint:
        """The point of one width."""
        for point in self.points:
            if point.is_at(width):
                return point
        known = [point.width for point in self.points if point.width is not None]
        raise AnywidthError(f"width {width!r} is not in the spectrum {self.name!r}: it has {known}")

    @property
    def latency_label(self) -> str:
        """The heading of the latency, which says what ran the network."""
        return f"{self.latency_by or 'latency'}, ms"

    @property
    def title(self) -> str:
        """The name of the network and of the data it was measured on."""
        return f"{self.name}, {self.measured_on}" if self.measured_on else self.name

    def to_json(self) -> dict[str, Any]:
        about = {name: getattr(self, name) for name in _KEPT}
        points = [{**vars(point), "channels": point.channels.to_json()} for point in self.points]
        return {"version": _VERSION, **about, "points": points}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Spectrum:
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != _VERSION:
            raise AnywidthError(f"spectrum of version {version!r}: expected version {_VERSION}")
        with errors_about("damaged spectrum", "write it again with to_json()"):
            found = _SPECTRUM(data, "")
        points = tuple(SpectrumPoint(**point) for point in found["points"])
        return Spectrum(points=points, **{name: found[name] for name in _KEPT})

    def to_csv(self, path: str | Path) -> None:
        """Write one row per width: width, macs, parameters, the metrics, latency_ms.

        A CSV file has no channel configurations; JSON has.
        """
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow([*_COST_COLUMNS, *self.metrics, "latency_ms"])
        for point in self.points:
            metrics = [point.metrics.get(name) for name in self.metrics]
            writer.writerow([point.width, point.macs, point.parameters, *metrics, point.latency_ms])
        write_atomically(path, table.getvalue().encode())


_POINT = values.record(
    {
        "width": values.optional(values.number),
        "channels": ChannelConfig.from_json,
        "macs": values.whole(0),
        "parameters": values.whole(0),
        "metrics": values.mapped(values.any_number),
        "latency_ms": values.optional(values.number),
        "latency_range": values.optional(values.row(values.number, values.number)),
    },
    {"latency_range": None},  # files of older versions lack it
)
_SPECTRUM = values.record(
    {"version": values.whole(_VERSION, _VERSION), **_KEPT, "points": values.listed(_POINT)},
    {"latency_by": None, "latency_on": None, "measured_on": ""},
)


def spectrum(
    model: nn.Module,
    evaluate: Callable[[nn.Module], Mapping[str, float]],
    widths: Sequence[Width],
    *,
    name: str = "",
    kind: str = "us",
    measure_latency: bool = False,
    progress: bool = True,
) -> Spectrum:
    """Evaluate a converted network at many widths.

    Every width is checked for batch-norm statistics before the first is evaluated. Widths with
    the same channels are the same network and are evaluated once. Afterwards the network has its
    old width and its old training or evaluation mode.

    Args:
        model: a converted network, calibrated at these widths.
        evaluate: called with the network, set to a width, in evaluation mode and without
            gradients; returns a mapping from names to numbers, the main metric first.
        widths: fractions of the full width, or configurations.
        name: the label in plots and tables.
        kind: "us", "s", "i" or "control"; decides how a plot draws it.
        measure_latency: also time forward passes of one example: the widths take turns, and the
            mean of the fastest third is the latency. On a CPU this is the network with folded
            norms, as one would ship it: in onnxruntime if the packages anywidth-runtime and onnx
            are installed, else in PyTorch. On a GPU it is the sliced network in PyTorch, because
            cuDNN prepares every new shape for up to a second.
        progress: show the progress, if rich is installed.

    Example:
        >>> result = anywidth.spectrum(model, evaluate, [0.25, 0.5, 1.0], name="US-Net")
        >>> result.to_csv("spectrum.csv")
    """
    if not callable(evaluate):
        raise AnywidthError(
            f"spectrum(evaluate={evaluate!r}): expected a function that takes the network and "
            'returns numbers by name, e.g. {"top1_error": 8.1}'
        )
    widths = width_list(widths, "spectrum")
    state = state_of(model)
    measured: dict[ChannelConfig, dict[str, float]] = {}
    timed: Latencies | None = None
    with evaluating(model), torch.no_grad():
        check_statistics(model, widths)
        # The widest first, so that the remaining time is not underestimated.
        configs = {state.resolve(width): width for width in reversed(widths)}
        order = sorted(configs, key=lambda config: -macs(model, config))
        for config in tracked_if_shown(order, "evaluating widths", progress):
            model.eval()  # `evaluate` may have changed it
            with at_width(model, configs[config]):
                measured[config] = numbers_by_name(evaluate(model))
        if measure_latency:
            model.eval()
            timed = deployed_latencies(model, order, progress)
    points = []
    for width in widths:
        config = state.resolve(width)
        uniform = None if isinstance(width, ChannelConfig) else float(width)
        costs = macs(model, config), parameter_count(model, config)
        point = SpectrumPoint(uniform, config, *costs, dict(measured[config]))
        if timed is not None:
            ms, fastest, median = timed.timings[config]
            point = replace(point, latency_ms=ms, latency_range=(fastest, median))
        points.append(point)
    found = Spectrum(name, tuple(points), kind)
    return found if timed is None else replace(found, latency_by=timed.by, latency_on=timed.on)


def joined(spectra: Iterable[Spectrum]) -> list[Spectrum]:
    """Merge spectra of one name and kind: I-Nets are one network per width, but one series."""
    series: dict[tuple[str, str], Spectrum] = {}
    for one in spectra:
        before = series.get((one.name, one.kind), replace(one, points=()))
        series[one.name, one.kind] = replace(one, points=before.points + one.points)
    return list(series.values())


def values_at(spectrum: Spectrum, width: float, metric: str) -> list[float]:
    """A metric at one uniform width: no value, one, or one per network of a joined series."""
    found = [point.metrics for point in spectrum.points if point.is_at(width)]
    return [metrics[metric] for metrics in found if metric in metrics]


def standard_error(point: SpectrumPoint, metric: str) -> float:
    """The standard error of a metric over images or games; 0 if it is not known."""
    return point.metrics.get(metric + STANDARD_ERROR, 0.0)


def standard_error_of_share(share: float, count: float) -> float:
    """The binomial standard error of a share of `count` examples, both in percent.

    One example of each kind is added, so that a share of 0 % is not certain.
    """
    likely = (share / 100 * count + 1) / (count + 2)
    return 100 * math.sqrt(likely * (1 - likely) / count)


def check_statistics(model: nn.Module, widths: Sequence[Width]) -> None:
    """Raise now, not hours later, if a norm has no statistics for a width."""
    norms = norm_records(model)
    with evaluating(model):  # in training mode, reading statistics would make them count as new
        for width in widths:
            with at_width(model, width):
                for norm in norms:
                    _ = norm.running_mean


def undescribed(metric: str) -> Metric:
    """A metric that nothing describes: higher is better, unless it is called an error or a loss."""
    is_cost = any(word in metric.lower() for word in ("error", "loss"))
    return Metric(metric.replace("_", " "), lower_is_better=is_cost)


def numbers_by_name(metrics: Any) -> dict[str, float]:
    """What `evaluate` returned, checked."""
    if not isinstance(metrics, Mapping):
        raise AnywidthError(
            f"evaluate(model) returned {type(metrics).__name__}: expected numbers by name, "
            'e.g. {"top1_error": 8.1}'
        )
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise AnywidthError(
            f"evaluate(model) returned {dict(metrics)!r}: expected numbers by name ({error})"
        ) from error
