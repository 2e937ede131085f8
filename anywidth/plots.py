"""Pictures: the FLOPs-accuracy spectrum and training curves, as PNG or SVG by the file's name."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anywidth.errors import AnywidthError
from anywidth.spectra import Spectrum, joined, standard_error
from anywidth.spectrum_tables import format_metric, format_width, metric_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

INK, FAINT_INK, GRID = "#24292f", "#59636e", "#d9dee3"
"""Text, lesser text and grid lines; a page with a dark side replaces them."""

_BLUE, _ORANGE, _GREEN, _PURPLE = "#2f7fd1", "#e0762a", "#2a9d73", "#b05fc0"
_GREY = "#8a929b"
_CURVE_LABELS = {
    "accuracy": "accuracy on the batch, %",
    "validation_error": "validation error, %",
    "validation_psnr": "validation PSNR, dB",
}
# For each kind of spectrum: how its marks look, and the colours of its first few series.
# S-Nets are hollow, because at a shared width they lie on top of the others.
_LOOKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "us": ({"marker": "o", "markersize": 4.5}, (_BLUE, _GREEN, _PURPLE, _ORANGE)),
    "s": (
        {"marker": "s", "markersize": 8, "linestyle": "none", "markerfacecolor": "none"},
        (_GREEN, _PURPLE, _ORANGE, _BLUE),
    ),
    "i": (
        {"marker": "D", "markersize": 5.5, "linestyle": "none"},
        (_ORANGE, _PURPLE, _GREEN, _BLUE),
    ),
    "control": (
        {"marker": "x", "markersize": 6, "linestyle": ":"},
        (_GREY, _PURPLE, _GREEN, _ORANGE),
    ),
}
_QUANTITIES = ("loss", "error", "accuracy", "psnr", "ssim", "return", "score")
_STEPS = (0.5, 0.25, 0.1)
_MOST_CURVE_POINTS = 300
# A wider legend would not fit between the axes, as a share of the figure.
_MOST_LEGEND_IN_FRAME = 0.85
_STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT_INK,
    "axes.titlecolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": FAINT_INK,
    "ytick.labelcolor": FAINT_INK,
    "text.color": INK,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    # Text stays text, and names inside the file do not change from run to run.
    "svg.fonttype": "none",
    "svg.hashsalt": "anywidth",
}


def plot_spectra(
    spectra: Sequence[Spectrum],
    path: str | Path,
    metric: str | None = None,
    title: str = "",
) -> None:
    """Draws a metric against multiply-adds.

    A US-Net is a line with a dot a width, S-Nets are squares, I-Nets diamonds, a control a dotted
    line with crosses. Bars are standard errors, where a metric has them. Spectra of one name and
    kind are one series. A control that would squeeze
    everything else flat is cut off at the frame, and the legend says how far it goes.

    Args:
        spectra: what `anywidth.spectrum` returned, one or more.
        path: ends in .png or .svg.
        metric: what to draw; the first spectrum's main metric if not given.
        title: stands above the plot.
    """
    _write(path, lambda: spectra_figure(spectra, metric, title))


def plot_curves(
    rows: Sequence[Mapping[str, float]],
    path: str | Path,
    quantities: Sequence[str] | None = None,
    title: str = "",
) -> None:
    """Draws training curves: a panel for each quantity, a line for each width.

    A column is named `quantity/width`, as in "loss/0.25", or for the two ends `quantity_max` and
    `quantity_min`; any other is a line of its own. The horizontal axis is the column "agent_steps"
    where there is one, "epoch" where that grows from row to row, else "step".

    Args:
        rows: what `anywidth.metrics.read_metrics` returned.
        path: ends in .png or .svg.
        quantities: which to draw; losses, errors, accuracies and the like if not given.
        title: stands above the plot.
    """
    _write(path, lambda: curves_figure(rows, quantities, title))


def spectra_figure(
    spectra: Sequence[Spectrum], metric: str | None = None, title: str = ""
) -> Figure:
    """The figure of `plot_spectra`; call it and `figure_bytes` inside `style()`."""
    from matplotlib.figure import Figure

    if not spectra:
        raise AnywidthError("no spectra to draw: give at least one")
    metric = spectra[0].metric(metric)
    series = [_series(one, metric) for one in joined(spectra)]
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes: Axes = figure.subplots()
    costs = [cost for one in series for cost in one.macs]
    unit, scale = _unit(max(costs))
    low, high = _limits(series)
    used: dict[str, int] = {}
    for one in series:
        look, colors = _LOOKS[one.kind]
        color = colors[used.get(one.kind, 0) % len(colors)]
        used[one.kind] = used.get(one.kind, 0) + 1
        axes.plot(
            [cost / scale for cost in one.macs],
            one.values,
            color=color,
            label=_legend(one, low, high),
            zorder=2 if one.kind == "control" else 3,
            markeredgewidth=1.6,
            **look,
        )
        if any(one.errors):
            places = [cost / scale for cost in one.macs]
            axes.errorbar(
                places, one.values, one.errors, fmt="none", color=color, elinewidth=1, capsize=2.5
            )
    axes.set_xlabel(f"multiply-adds{unit}")
    axes.set_ylabel(metric_label(metric))
    axes.set_xlim(*_padded(min(costs) / scale, max(costs) / scale, 0.05))
    axes.set_ylim(low, high)
    if any(_beyond(one, low, high) or any(one.errors) for one in series):
        # Lines that leave the frame leave no corner of it free, and a legend is blind to bars.
        _legend_below(figure)
    elif len(series) > 1 or series[0].name:
        legend = axes.legend(loc="best", labelcolor=INK)
        if _size(figure, legend)[0] > _MOST_LEGEND_IN_FRAME * figure.bbox.width:
            legend.remove()
            _legend_below(figure)
    _width_axis(axes, spectra, scale)
    if title:
        axes.set_title(title)
    return figure


def curves_figure(
    rows: Sequence[Mapping[str, float]], quantities: Sequence[str] | None = None, title: str = ""
) -> Figure:
    """The figure of `plot_curves`; call it and `figure_bytes` inside `style()`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    panels = _panels(rows, quantities)
    if not panels:
        names = list(dict.fromkeys(name for row in rows for name in row))
        raise AnywidthError(
            f"no training curves in the columns {names[:12]}: expected some like loss/1.0"
            + (f" for the quantities {list(quantities)}" if quantities is not None else "")
        )
    across = _across(rows)
    wide = 3 if len(panels) == 3 else min(2, len(panels))
    deep = math.ceil(len(panels) / wide)
    figure = Figure(figsize=(max(7.2, 3.2 * wide + 1.4), 3.4 * deep), layout="constrained")
    grid = figure.subplots(deep, wide, squeeze=False).flatten().tolist()
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes, (quantity, lines) in zip(grid, panels.items(), strict=False):
        colors = _blend(len(lines))
        for color, (label, column) in zip(colors, lines.items(), strict=True):
            points = [(r[across], r[column]) for r in rows if across in r and column in r]
            steps, values = _averaged(points)
            marker = "o" if len(steps) <= 30 else ""
            axes.plot(steps, values, marker=marker, markersize=3, color=color, label=label)
        axes.set_xlabel(across.replace("_", " "))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
        axes.set_title(_CURVE_LABELS.get(quantity, metric_label(quantity)))
        axes.margins(x=0.03)
        if any(lines):
            heading = "width" if all(map(_is_number, lines)) else None
            axes.legend(loc="best", labelcolor=INK, title=heading)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure


def _tick(value: float) -> str:
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= 10 * size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def has_curves(rows: Sequence[Mapping[str, float]]) -> bool:
    """Whether `plot_curves` finds anything to draw."""
    return bool(_panels(rows, None))


def figure_bytes(figure: Figure, form: str, transparent: bool = False) -> bytes:
    """A figure as PNG or SVG, the same bytes for the same figure every time."""
    # No date, no address, no version: only the picture.
    nothing: dict[str, Any] = {
        "svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
        "png": {"Software": None},
    }
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=160, transparent=transparent, metadata=nothing[form])
    return buffer.getvalue()


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Matplotlib's defaults and ours on top, whatever the user's own settings are."""
    try:
        import matplotlib.style
    except ImportError as error:
        raise AnywidthError("plots need matplotlib: install anywidth[cli]") from error
    with matplotlib.style.context(["default", _STYLE]):
        yield


def _write(path: str | Path, draw: Callable[[], Figure]) -> None:
    from anywidth.files import write_atomically

    path = Path(path)
    form = path.suffix.lower().removeprefix(".")
    if form not in ("png", "svg"):
        raise AnywidthError(f"cannot draw {path}: expected a name that ends in .png or .svg")
    with style():
        content = figure_bytes(draw(), form)
    write_atomically(path, content)


# ---- spectra -------------------------------------------------------------------------------------


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
    return _padded(low, high, 0.07)


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
    """A legend under the axes: two columns if they fit, else one, its labels broken if need be.

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


# ---- curves --------------------------------------------------------------------------------------


def _panels(
    rows: Sequence[Mapping[str, float]], quantities: Sequence[str] | None
) -> dict[str, dict[str, str]]:
    """For each quantity, the label and the column of each of its lines."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    panels: dict[str, dict[str, str]] = {}
    for column in columns:
        quantity, label = _quantity_and_label(column)
        wanted = (
            any(word in quantity.lower() for word in _QUANTITIES)
            if quantities is None
            else quantity in quantities
        )
        if wanted and column not in ("step", "epoch"):
            panels.setdefault(quantity, {})[label] = column
    return {q: dict(sorted(lines.items(), key=_by_width)) for q, lines in panels.items()}


def _quantity_and_label(column: str) -> tuple[str, str]:
    for ending, label in (("_max", "widest"), ("_min", "narrowest")):
        if column.endswith(ending):
            return column.removesuffix(ending), label
    quantity, slash, label = column.rpartition("/")
    return (quantity, label) if slash else (column, "")


def _across(rows: Sequence[Mapping[str, float]]) -> str:
    """A game's steps where they are counted. Epochs only where they tell rows apart."""
    if any("agent_steps" in row for row in rows):
        return "agent_steps"
    epochs = [row["epoch"] for row in rows if "epoch" in row]
    grow = all(one < other for one, other in itertools.pairwise(epochs))
    return "epoch" if epochs and grow else "step"


def _by_width(line: tuple[str, str]) -> tuple[float, str]:
    """Widest first; names that are no numbers after them, "widest" first among those."""
    if _is_number(line[0]):
        return -float(line[0]), ""
    return math.inf, "" if line[0] == "widest" else line[0]


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return math.isfinite(float(text))
    return False


def _averaged(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Means over equal stretches where there are more points than a plot can show."""
    finite = [(step, value if math.isfinite(value) else math.nan) for step, value in points]
    size = math.ceil(len(finite) / _MOST_CURVE_POINTS) or 1
    parts = [finite[i : i + size] for i in range(0, len(finite), size)]
    return [_mean(x for x, _ in part) for part in parts], [
        _mean(y for _, y in part) for part in parts
    ]


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _blend(count: int) -> list[str]:
    """Colours from blue for the widest to orange for the narrowest."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    if count <= 2:
        return [_BLUE, _ORANGE][:count]
    scale = LinearSegmentedColormap.from_list("widths", [_BLUE, _GREEN, _ORANGE])
    return [to_hex(scale(index / (count - 1))) for index in range(count)]
