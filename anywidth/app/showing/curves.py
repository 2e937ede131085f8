"""Training curves: a panel for each quantity, a line for each width."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anywidth.app.showing.figure_style import BLUE, GREEN, INK, ORANGE, write_figure
from anywidth.errors import AnywidthError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_POINTS = 300


def plot_curves(
    rows: Sequence[Mapping[str, float]], path: str | Path, titles: Mapping[str, str]
) -> None:
    """Draws training curves: a panel for each quantity, a line for each width.

    A column is named `quantity/width`, as in "loss/0.25", or for the two ends `quantity_max` and
    `quantity_min`; any other is a line of its own. The horizontal axis is the column "agent_steps"
    where there is one, "epoch" where that grows from row to row, else "step".

    Args:
        rows: what `anywidth.app.runs.metrics.read_metrics` returned.
        path: ends in .png or .svg.
        titles: quantities to draw → what stands above their panels.
    """
    write_figure(path, lambda: curves_figure(rows, titles))


def curves_figure(rows: Sequence[Mapping[str, float]], titles: Mapping[str, str]) -> Figure:
    """The figure of `plot_curves`; call it and `figure_bytes` inside `style()`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    panels = _panels(rows, titles)
    if not panels:
        names = list(dict.fromkeys(name for row in rows for name in row))
        raise AnywidthError(
            f"no training curves in the columns {names[:12]}: expected some of {list(titles)}"
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
        axes.set_title(titles[quantity])
        axes.margins(x=0.03)
        if any(lines):
            heading = "width" if all(map(_is_number, lines)) else None
            axes.legend(loc="best", labelcolor=INK, title=heading)
    return figure


def _tick(value: float) -> str:
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= 10 * size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def has_curves(rows: Sequence[Mapping[str, float]], titles: Mapping[str, str]) -> bool:
    """Whether `plot_curves` finds anything to draw."""
    return bool(_panels(rows, titles))


def _panels(
    rows: Sequence[Mapping[str, float]], titles: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """For each quantity, the label and the column of each of its lines."""
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
    size = math.ceil(len(finite) / _MOST_POINTS) or 1
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
        return [BLUE, ORANGE][:count]
    scale = LinearSegmentedColormap.from_list("widths", [BLUE, GREEN, ORANGE])
    return [to_hex(scale(index / (count - 1))) for index in range(count)]
