"""Plots of spectra: error or score over multiply-adds, and latency over width."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anywidth.app.showing.figure_style import (
    BLUE,
    FAINT_INK,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    write_figure,
)
from anywidth.app.showing.spectrum_tables import format_metric, format_width
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import Spectrum, SpectrumPoint, joined, standard_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend


# Per kind of spectrum: the look of its marks, and the colours of its first few series.
# S-Nets are hollow, because at shared widths they cover the others.
LOOKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "us": ({"marker": "o", "markersize": 4.5}, (BLUE, GREEN, PURPLE, ORANGE, GREY)),
    "s": (
        {"marker": "s", "markersize": 8, "linestyle": "none", "markerfacecolor": "none"},
        (GREEN, PURPLE, ORANGE, BLUE),
    ),
    "i": (
        {"marker": "D", "markersize": 5.5, "linestyle": "none"},
        (ORANGE, PURPLE, GREEN, BLUE),
    ),
    "control": (
        {"marker": "x", "markersize": 6, "linestyle": ":"},
        (GREY, PURPLE, GREEN, ORANGE),
    ),
}
_STEPS = (0.5, 0.25, 0.1)
# The largest width of a legend inside the axes, as a share of the figure.
_MOST_LEGEND_IN_FRAME = 0.85
_LONGEST_TITLE = 68
# An axis spans at least so many standard errors, and this share of its values: a curve that is
# flat within the noise then looks flat.
_LEAST_ERRORS = 10
_LEAST_SHARE = 0.01


def plot_spectra(
    spectra: Sequence[Spectrum],
    path: str | Path,
    metric: str | None = None,
    title: str = "",
) -> None:
    """Draw a metric over multiply-adds.

    A US-Net is a line with one dot per width, S-Nets are squares, I-Nets diamonds, a control is a
    dotted line with crosses. Bars are standard errors, if a metric has them. Spectra of one name
    and kind are one series. A control that would squeeze the others is cut off at the frame, and
    the legend gives its furthest value. By default, the first spectrum's main metric is drawn.
    """
    write_figure(path, lambda: spectra_figure(spectra, metric, title))


def spectra_figure(
    spectra: Sequence[Spectrum], metric: str | None = None, title: str = ""
) -> Figure:
    """The figure of `plot_spectra`; call it and `figure_bytes` inside `style()`."""
    from matplotlib.figure import Figure

    metric = spectra[0].metric(metric)
    series = [_series(one, metric) for one in joined(spectra)]
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes: Axes = figure.subplots()
    costs = [cost for one in series for cost in one.macs]
    unit, scale = _unit(max(costs))
    low, high = _limits(series)
    axes.set_xlabel(f"multiply-adds{unit}")
    noted = " ± standard error" if any(any(one.errors) for one in series) else ""
    axes.set_ylabel(spectra[0].describe(metric).label + noted)
    axes.set_xlim(*_padded(min(costs) / scale, max(costs) / scale, 0.05))
    axes.set_ylim(low, high)
    _draw(axes, series, scale)
    if title and len(series) == 1 and not _beyond(series[0], low, high):
        pass  # the title names it
    elif any(_beyond(one, low, high) or any(one.errors) for one in series):
        # Lines that leave the frame leave no corner of it free, and a legend is blind to bars.
        _legend_below(figure)
    elif len(series) > 1 or series[0].name:
        legend = axes.legend(loc="best", labelcolor=INK)
        if _size(figure, legend)[0] > _MOST_LEGEND_IN_FRAME * figure.bbox.width:
            legend.remove()
            _legend_below(figure)
    _width_axis(axes, spectra, scale)
    if title:
        axes.set_title(textwrap.fill(title, _LONGEST_TITLE))
    return figure


def _draw(axes: Axes, series: Sequence[_Series], scale: float) -> None:
    """Marks and bars."""
    low, high = axes.get_ylim()
    for one, color in zip(series, series_colors([one.kind for one in series]), strict=True):
        look, _ = LOOKS[one.kind]
        places = [cost / scale for cost in one.macs]
        axes.plot(
            places,
            one.values,
            color=color,
            label=_legend(one, low, high),
            zorder=2 if one.kind == "control" else 3,
            markeredgewidth=1.6,
            **look,
        )
        if any(one.errors):
            axes.errorbar(
                places, one.values, one.errors, fmt="none", color=color, elinewidth=1, capsize=2
            )


def series_colors(kinds: Iterable[str]) -> list[str]:
    """A colour per series: the first of a kind has its kind's own, others have free ones."""
    kinds = list(kinds)
    taken = {LOOKS[kind][1][0] for kind in kinds}
    used: Counter[str] = Counter()
    chosen = []
    for kind in kinds:
        _, colors = LOOKS[kind]
        color = colors[used[kind] % len(colors)]
        if used[kind]:
            color = next((one for one in colors if one not in taken), color)
        chosen.append(color)
        taken.add(color)
        used[kind] += 1
    return chosen


@dataclass(frozen=True)
class _Series:
    name: str
    kind: str
    macs: tuple[int, ...]
    values: tuple[float, ...]
    errors: tuple[float, ...]


def _series(spectrum: Spectrum, metric: str) -> _Series:
    spectrum.metric(metric)
    found = sorted(
        (point.macs, point.metrics[metric], standard_error(point, metric))
        for point in spectrum.points
        if math.isfinite(point.metrics.get(metric, math.nan))
    )
    if not found:
        raise AnywidthError(f"{metric!r} of {spectrum.name!r} is not a finite number anywhere")
    costs, values, errors = zip(*found, strict=True)
    return _Series(spectrum.name, spectrum.kind, costs, values, errors)


def _limits(series: Sequence[_Series]) -> tuple[float, float]:
    """Room for every value, unless controls would leave the others under a third of it.

    Then the frame ends where the others end, on those sides alone that controls run far beyond.
    """
    everything = [value for one in series for value in _extent(one)]
    measured = [value for one in series if one.kind != "control" for value in _extent(one)]
    low, high = min(everything), max(everything)
    if measured and (max(measured) - min(measured)) * 3 < high - low:
        inner_low, inner_high = _padded(min(measured), max(measured), 0.1)
        room = inner_high - inner_low
        low = low if inner_low - low <= room else inner_low
        high = high if high - inner_high <= room else inner_high
    low, high = _padded(low, high, 0.07)
    shown = [one for one in series if one.kind != "control"] or series
    values = [value for one in shown for value in one.values]
    errors = [error for one in shown for error in one.errors]
    lacking = least_span(values, errors) - (high - low)
    return (low - lacking / 2, high + lacking / 2) if lacking > 0 else (low, high)


def least_span(values: Sequence[float], errors: Sequence[float]) -> float:
    """What an axis must span so that differences within the noise do not fill it."""
    known = [error for error in errors if error > 0] or [0.0]
    return max(
        _LEAST_ERRORS * statistics.median(known),
        _LEAST_SHARE * statistics.fmean(map(abs, values)),
    )


def _extent(one: _Series) -> list[float]:
    pairs = list(zip(one.values, one.errors, strict=True))
    return [value - error for value, error in pairs] + [value + error for value, error in pairs]


def _beyond(one: _Series, low: float, high: float) -> list[float]:
    return [value for value in one.values if not low <= value <= high]


def _legend(one: _Series, low: float, high: float) -> str:
    if not (beyond := _beyond(one, low, high)):
        return one.name or one.kind
    furthest = max(beyond, key=lambda value: max(low - value, value - high))
    return f"{one.name or one.kind} (beyond the frame, to {format_metric(furthest)})"


def _legend_below(figure: Figure) -> None:
    """A legend under the axes: in two columns if they fit, else in one, with long labels wrapped.

    The figure grows by the lines that are more than two columns would have.
    """
    handles, labels = figure.axes[0].get_legend_handles_labels()
    usual = 0.0
    for columns, longest in ((2, None), *((1, n) for n in (None, *range(80, 0, -5)))):
        texts = [label if longest is None else textwrap.fill(label, longest) for label in labels]
        legend = figure.legend(
            handles, texts, loc="outside lower center", ncols=columns, labelcolor=INK
        )
        width, height = _size(figure, legend)
        usual = usual or height
        if width <= figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + (height - usual) / figure.dpi)
            return
        legend.remove()


def _size(figure: Figure, legend: Legend) -> tuple[float, float]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    extent = legend.get_window_extent(FigureCanvasAgg(figure).get_renderer())
    return extent.width, extent.height


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    room = (high - low) * share or abs(high) * share or share
    return low - room, high + room


def _unit(largest: float) -> tuple[str, float]:
    for name, scale in ((", G", 1e9), (", M", 1e6), (", k", 1e3)):
        if largest >= 10 * scale or (largest >= scale and name != ", G"):
            return name, scale
    return "", 1.0


def _width_axis(axes: Axes, spectra: Sequence[Spectrum], scale: float) -> None:
    """Widths along the top, where all spectra agree on what a width costs."""
    costs: dict[float, int] = {}
    for point in (point for one in spectra for point in one.points):
        if point.width is not None and costs.setdefault(point.width, point.macs) != point.macs:
            return
    if len(costs) < 2:
        return
    left, right = axes.get_xlim()
    ticks: dict[float, str] = {}
    ranked = sorted(costs, key=lambda width: _importance(width, costs))
    if len(ranked) > 8:
        ranked = [width for width in ranked if _importance(width, costs)[0] <= len(_STEPS)]
    for width in ranked:
        place = costs[width] / scale
        if all(abs(place - other) > 0.08 * (right - left) for other in ticks):
            ticks[place] = format_width(width)
    top = axes.secondary_xaxis("top")
    top.set_xticks(list(ticks), list(ticks.values()))
    top.set_xlabel("width")
    top.spines["top"].set_visible(False)


def _importance(width: float, widths: Iterable[float]) -> tuple[int, float]:
    """The ends first, then halves, quarters, tenths: the numbers people look for on an axis."""
    if width in (min(widths), max(widths)):
        return 0, width
    fits = [i for i, step in enumerate(_STEPS, 1) if abs(width / step - round(width / step)) < 1e-6]
    return min(fits, default=len(_STEPS) + 1), width


def timed_points(spectrum: Spectrum) -> list[SpectrumPoint]:
    """The points of uniform widths whose latency was measured, narrowest first."""
    known = [
        point
        for point in spectrum.points
        if point.width is not None and math.isfinite(point.latency_ms or math.nan)
    ]
    return sorted(known, key=lambda point: point.width or 0.0)


def latency_conditions(spectrum: Spectrum) -> str:
    """What a latency depends on: what ran the network, the batch and the device."""
    known = [spectrum.latency_by, "batch size 1", spectrum.latency_on]
    return ", ".join(filter(None, known))


def latency_figure(spectrum: Spectrum) -> Figure:
    """Latency over width; call it and `figure_bytes` inside `style()`."""
    from matplotlib.figure import Figure

    points = timed_points(spectrum)
    widths = [point.width or 0.0 for point in points]
    times = [point.latency_ms or 0.0 for point in points]
    ranges = [
        point.latency_range or (time, time) for point, time in zip(points, times, strict=True)
    ]
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(widths, times, marker="o", markersize=4.5, color=BLUE)
    axes.vlines(widths, *zip(*ranges, strict=True), color=BLUE, linewidth=1.2, alpha=0.6)
    # From zero, so that twice as high is twice as long.
    axes.set_ylim(0, 1.08 * max(*times, *(high for _, high in ranges)))
    axes.set_xlabel("width")
    axes.set_ylabel("latency, ms")
    figure.suptitle(spectrum.name, x=0.02, ha="left", weight="bold", size=12)
    axes.set_title(
        f"{latency_conditions(spectrum)}; bars from the fastest to the median pass",
        size=9,
        weight="normal",
        color=FAINT_INK,
    )
    return figure
