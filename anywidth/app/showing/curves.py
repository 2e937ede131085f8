"""Training curves: one panel per quantity, one line per width."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from anywidth.app.showing.figure_style import BLUE, GREEN, INK, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_POINTS = 300
# An axis spans at least this share of its values: less is noise.
_LEAST_SHARE = 0.02
# Size of a panel in inches: its text is readable when a phone shrinks it to its screen.
_BREADTH, _HEIGHT = 4.6, 3.1


def curves_figure(rows: Sequence[Mapping[str, float]], titles: Mapping[str, str]) -> Figure:
    """Training curves: one panel per quantity, one line per width; call it inside `style()`.

    A column is named `quantity/width`, such as "loss/0.25", or for the two ends `quantity_max` and
    `quantity_min`; any other column is a single line. The horizontal axis is the column
    "agent_steps" if there is one, "epoch" if it grows from row to row, else "step". `rows` are from
    `read_metrics`, and `titles` maps the quantities to draw to the titles of their panels. The
    panels are below each other, so that they can be read on a phone.
    """
    from matplotlib.figure import Figure

    panels = _panels(rows, titles)
    figure = Figure(figsize=(_BREADTH, _HEIGHT * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), squeeze=False).flatten().tolist()
    for axes, (quantity, lines) in zip(grid, panels.items(), strict=True):
        _draw(axes, rows, lines)
        axes.set_title(titles[quantity])
    return figure


def curves_panels(rows: Sequence[Mapping[str, float]], titles: Mapping[str, str]) -> list[Figure]:
    """One figure per panel, for a page that arranges them itself."""
    found = _panels(rows, titles)
    return [curves_figure(rows, {quantity: titles[quantity]}) for quantity in found]


def _draw(axes: Axes, rows: Sequence[Mapping[str, float]], lines: Mapping[str, str]) -> None:
    """One line per width, over the whole training; a single value is a large mark."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    across = _across(rows)
    for color, (label, column) in zip(_blend(len(lines)), lines.items(), strict=True):
        points = [(r[across], r[column]) for r in rows if across in r and column in r]
        steps, values = _averaged(points)
        is_alone = len(steps) == 1
        marker = "o" if len(steps) <= 30 else ""
        axes.plot(
            steps,
            values,
            marker=marker,
            linestyle="none" if is_alone else "-",
            markersize=8.0 if is_alone else 3.0,
            markeredgewidth=2.0 if is_alone else 1.0,
            # Hollow, so that two equal values are both seen.
            markerfacecolor="none" if is_alone and label != next(iter(lines)) else color,
            color=color,
            label=label,
        )
    last = max((row[across] for row in rows if across in row), default=1.0)
    low, high = axes.get_ylim()
    lacking = _LEAST_SHARE * max(abs(low), abs(high)) - (high - low)
    if lacking > 0:
        axes.set_ylim(low - lacking / 2, high + lacking / 2)
    axes.set_xlim(-0.03 * last, 1.03 * last)
    axes.set_xlabel(across.replace("_", " "))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    if any(lines):
        heading = "width" if all(map(_is_number, lines)) else None
        axes.legend(loc="best", labelcolor=INK, title=heading)


def _tick(value: float) -> str:
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= 10 * size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def has_curves(rows: Sequence[Mapping[str, float]], titles: Mapping[str, str]) -> bool:
    """Whether there is anything to draw."""
    return bool(_panels(rows, titles))


def _panels(
    rows: Sequence[Mapping[str, float]], titles: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Per quantity: the labels and columns of its lines."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    panels: dict[str, dict[str, str]] = {}
    for column in columns:
        quantity, label = _quantity_and_label(column)
        if quantity in titles:
            panels.setdefault(quantity, {})[label] = column
    for quantity, lines in panels.items():
        if list(lines) == ["widest"]:  # of a network with one width
            panels[quantity] = {"": lines["widest"]}
    return {q: dict(sorted(lines.items(), key=_by_width)) for q, lines in panels.items()}


def _quantity_and_label(column: str) -> tuple[str, str]:
    for ending, label in (("_max", "widest"), ("_min", "narrowest")):
        if column.endswith(ending):
            return column.removesuffix(ending), label
    quantity, slash, label = column.rpartition("/")
    return (quantity, label) if slash else (column, "")


def _across(rows: Sequence[Mapping[str, float]]) -> str:
    """The column for the horizontal axis; epochs only if they differ from row to row."""
    if any("agent_steps" in row for row in rows):
        return "agent_steps"
    epochs = [row["epoch"] for row in rows if "epoch" in row]
    grow = all(one < other for one, other in itertools.pairwise(epochs))
    return "epoch" if epochs and grow else "step"


def _by_width(line: tuple[str, str]) -> tuple[float, str]:
    """Widest first; then names that are not numbers, "widest" first among these."""
    if _is_number(line[0]):
        return -float(line[0]), ""
    return math.inf, "" if line[0] == "widest" else line[0]


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return math.isfinite(float(text))
    return False


def _averaged(points: Sequence[tuple[float, float]]) -> np.ndarray:
    """Steps and values, averaged over equal intervals if there are more than a plot can show."""
    size = math.ceil(len(points) / _MOST_POINTS) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    means = [np.ma.masked_invalid(part).mean(0).filled(math.nan) for part in parts]
    return np.reshape(means, (-1, 2)).T


def _blend(count: int) -> list[str]:
    """Colours from blue for the widest to orange for the narrowest."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    if count <= 2:
        return [BLUE, ORANGE][:count]
    scale = LinearSegmentedColormap.from_list("widths", [BLUE, GREEN, ORANGE])
    return [to_hex(scale(index / (count - 1))) for index in range(count)]
