"""Spectra as tables for a terminal, and numbers with units and spread."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anywidth.measuring.spectra import (
    STANDARD_ERROR,
    Metric,
    Spectrum,
    SpectrumPoint,
    joined,
    standard_error,
    values_at,
)
from anywidth.width import ChannelConfig, Width

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table


def spectrum_table(spectrum: Spectrum) -> FittedTable:
    """One row per width; a narrow terminal gets fewer columns and a line that names the others."""
    points = spectrum.points
    width = Column("width", [format_width(point.width) for point in points])
    macs = Column("multiply-adds", [format_count(point.macs) for point in points])
    parameters = Column("parameters", [format_count(point.parameters) for point in points])
    metrics = [
        Column(
            spectrum.describe(name).label,
            [format_point(point, name, spectrum.describe(name)) for point in points],
        )
        for name in shown_metrics(spectrum)
    ]
    latency = []
    if any(point.latency_ms is not None for point in points):
        times = [format_metric(point.latency_ms) for point in points]
        latency = [Column(spectrum.latency_label, times)]
    return FittedTable(
        spectrum.name,
        [width, macs, parameters, *metrics, *latency],
        [width, *metrics[:1], macs, parameters, *latency, *metrics[1:]],
    )


def comparison_table(spectra: Sequence[Spectrum], metric: str | None = None) -> BlockTable:
    """One row per width, one column per spectrum; runs of one name as mean ± deviation.

    If the columns do not fit side by side, they are numbered and continue below.
    """
    series = joined(spectra)
    metric = series[0].metric(metric)
    shown = series[0].describe(metric)
    widths = sorted({p.width for one in series for p in one.points if p.width is not None})
    columns = []
    for one in series:
        one.metric(metric)
        found = (values_at(one, width, metric) for width in widths)
        columns.append(Column(one.name, [format_mean(values, shown) for values in found]))
    first = Column("width", list(map(format_width, widths)))
    return BlockTable(shown.label, first, columns)


def shown_metrics(spectrum: Spectrum) -> list[str]:
    """The metrics with a column of their own: a standard error is shown beside its mean."""
    names = spectrum.metrics
    return [
        name
        for name in names
        if not (name.endswith(STANDARD_ERROR) and name.removesuffix(STANDARD_ERROR) in names)
    ]


def format_point(point: SpectrumPoint, name: str, metric: Metric | None = None) -> str:
    """A metric at one width, with its standard error if there is one."""
    value, error = point.metrics.get(name), standard_error(point, name)
    if value is None or error == 0:
        return format_metric(value, metric)
    return _with_spread(value, error, metric)


def format_mean(values: list[float], metric: Metric | None = None) -> str:
    """A single value, or mean ± standard deviation of several (seeds)."""
    if len(values) < 2:
        return format_metric(values[0] if values else None, metric)
    if not all(map(math.isfinite, values)):
        return format_metric(sum(values) / len(values), metric)
    return _with_spread(statistics.mean(values), statistics.stdev(values), metric)


def format_metric(value: float | None, metric: Metric | None = None) -> str:
    """A value with the decimals of its metric; if they are not known, by its size."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.{_places(value, metric)}f}"


def format_count(count: float) -> str:
    """A large count with its unit: 568.7 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def format_width(width: Width | None) -> str:
    if width is None or isinstance(width, ChannelConfig):
        return "nonuniform"
    return str(round(float(width), 6))


def _with_spread(value: float, spread: float, metric: Metric | None) -> str:
    """Both to the same decimal place."""
    places = _places(value, metric)
    return f"{value:.{places}f} ± {spread:.{places}f}"


def _places(value: float, metric: Metric | None) -> int:
    if metric is None or metric.decimals is None:
        return 2 if abs(value) >= 1 else 4
    return metric.decimals


# ---- tables that fit the terminal ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Column:
    """A heading over numbers, which are never wrapped."""

    heading: str
    cells: Sequence[str]

    @property
    def breadth(self) -> int:
        return max(map(len, [*self.heading.splitlines(), *self.cells]), default=0)

    def folded(self) -> Column:
        """The same column with its heading wrapped to about the width of its numbers."""
        parts = textwrap.wrap(self.heading, 1, break_long_words=False)
        room = max(map(len, [*parts, *self.cells]), default=1)
        return replace(self, heading="\n".join(textwrap.wrap(self.heading, room)))


@dataclass(frozen=True)
class FittedTable:
    """Prints the columns that fit, and a line that names the others and the file with all."""

    title: str
    columns: Sequence[Column]
    ranked: Sequence[Column]
    """The same columns, the most important first; the first two are always shown."""
    file: str = "spectrum.csv"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        if _fits(self.columns, options):
            yield _table(self.title, self.columns)
            return
        kept = list(self.ranked)
        while len(kept) > 2 and not _fits([one.folded() for one in kept], options):
            kept.pop()
        yield _table(self.title, [one.folded() for one in self.columns if one in kept])
        if left_out := [one.heading for one in self.columns if one not in kept]:
            yield Text(f"No room for: {'; '.join(left_out)}. {self.file} has all columns.")


@dataclass(frozen=True)
class BlockTable:
    """Prints any number of columns; if they do not fit, in blocks that begin with `first`."""

    title: str
    first: Column
    columns: Sequence[Column]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        whole = [self.first, *self.columns]
        for columns in (whole, [one.folded() for one in whole]):
            if _fits(columns, options):
                yield _table(self.title, columns)
                return
        for number, one in enumerate(self.columns, 1):
            yield Text(f"{number:>3}  {one.heading}")
        block, title = [self.first], self.title
        for number, one in enumerate(self.columns, 1):
            numbered = replace(one, heading=str(number))
            if len(block) > 1 and not _fits([*block, numbered], options):
                yield _table(title, block)
                block, title = [self.first], ""
            block.append(numbered)
        yield _table(title, block)


def _fits(columns: Sequence[Column], options: ConsoleOptions) -> bool:
    """Whether columns fit: three characters between two columns, one at either end."""
    return sum(one.breadth + 3 for one in columns) - 1 <= options.max_width


def _table(title: str, columns: Sequence[Column]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(title=escape(title) or None, box=SIMPLE_HEAD, pad_edge=False)
    for one in columns:
        table.add_column(Text(one.heading), justify="right", no_wrap=True)
    for cells in zip(*(one.cells for one in columns), strict=True):
        table.add_row(*cells)
    return table
