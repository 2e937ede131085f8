"""Spectra as people read them: tables for a terminal, numbers with their units and spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from anywidth.errors import AnywidthError
from anywidth.spectra import (
    STANDARD_ERROR,
    Spectrum,
    SpectrumPoint,
    joined,
    standard_error,
    values_at,
)

if TYPE_CHECKING:
    from rich.table import Table

_LABELS = {
    "top1_error": "top-1 error, %",
    "top5_error": "top-5 error, %",
    "top1_accuracy": "top-1 accuracy, %",
    "top5_accuracy": "top-5 accuracy, %",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "score": "mean score",
    "greedy_score": "mean score, greedy",
}


def spectrum_table(spectrum: Spectrum) -> Table:
    """A row a width, for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    has_latency = any(point.latency_ms is not None for point in spectrum.points)
    table = Table(title=spectrum.name or None, box=SIMPLE_HEAD, pad_edge=False)
    metrics = shown_metrics(spectrum)
    headings = ["width", "multiply-adds", "parameters", *map(metric_label, metrics)]
    for heading in headings + ["latency, ms"] * has_latency:
        table.add_column(heading, justify="right", no_wrap=" " not in heading)
    for point in spectrum.points:
        cells = [format_width(point.width), format_count(point.macs)]
        cells.append(format_count(point.parameters))
        cells += [format_point(point, name) for name in metrics]
        table.add_row(*cells, *[format_metric(point.latency_ms)] * has_latency)
    return table


def comparison_table(spectra: Sequence[Spectrum], metric: str | None = None) -> Table:
    """A row a width, a column a spectrum; several runs of one name as mean ± deviation."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    series = joined(spectra)
    if not series:
        raise AnywidthError("comparison_table([]): give at least one spectrum")
    metric = series[0].metric(metric)
    table = Table("width", title=metric_label(metric), box=SIMPLE_HEAD, pad_edge=False)
    for one in series:
        one.metric(metric)
        table.add_column(one.name, justify="right")
    widths = {p.width for one in series for p in one.points if p.width is not None}
    for width in sorted(widths):
        found = (values_at(one, width, metric) for one in series)
        table.add_row(format_width(width), *map(format_mean, found))
    return table


def shown_metrics(spectrum: Spectrum) -> list[str]:
    """The metrics a table has a column for: a standard error stands beside its mean."""
    names = spectrum.metrics
    return [
        name
        for name in names
        if not (name.endswith(STANDARD_ERROR) and name.removesuffix(STANDARD_ERROR) in names)
    ]


def format_point(point: SpectrumPoint, metric: str) -> str:
    """A metric at one width, with its standard error if there is one."""
    value, error = point.metrics.get(metric), standard_error(point, metric)
    if value is None or error == 0:
        return format_metric(value)
    return _with_spread(value, error)


def format_mean(values: list[float]) -> str:
    """The one value, or of several (seeds) the mean ± the standard deviation."""
    if len(values) < 2:
        return format_metric(values[0] if values else None)
    return _with_spread(statistics.mean(values), statistics.stdev(values))


def format_metric(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"


def format_count(count: float) -> str:
    """A large count with its unit: 568.7 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def format_width(width: float | None) -> str:
    return "nonuniform" if width is None else str(round(float(width), 6))


def metric_label(metric: str) -> str:
    """A metric's name as it stands on an axis."""
    return _LABELS.get(metric, metric.replace("_", " "))


def _with_spread(value: float, spread: float) -> str:
    """Both to the same decimal place."""
    places = 2 if abs(value) >= 1 else 4
    return f"{value:.{places}f} ± {spread:.{places}f}"
