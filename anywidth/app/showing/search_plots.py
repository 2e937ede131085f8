"""A search as a plot: its front and what it found, against the uniform widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anywidth.app.showing.figure_style import BLUE, GREY, INK, ORANGE
from anywidth.searching.found import Judged, SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = {
    "macs": ("multiply-adds, M", 1e6),
    "parameters": ("parameters, k", 1e3),
    "milliseconds": ("ms per example", 1.0),
}


def search_figure(result: SearchResult, label: str, title: str = "") -> Figure:
    """The metric of a search over the cost; `label` is the name of the metric and its unit.

    Lines show uniform widths and the front, judged with batch statistics. Marks are calibrated: the
    result for each budget, and the uniform width of the same cost.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes: Axes = figure.subplots()
    name, scale = _AXES[result.kind]

    def draw(judged: Sequence[Judged], look: str, color: str, text: str, size: float) -> None:
        costs = [one.cost / scale for one in judged]
        values = [one.metrics[result.metric] for one in judged]
        axes.plot(costs, values, look, color=color, label=text, markersize=size)

    draw(result.uniform, "o-", GREY, "uniform widths", 4)
    draw(result.front, ".-", BLUE, "greedy front", 4)
    best = [one.best for one in result.found if not one.is_uniform]
    if best:
        draw(best, "D", ORANGE, "found, calibrated", 8)
    draw([one.uniform for one in result.found], "s", GREY, "uniform, calibrated", 8)
    axes.set_xlabel(name)
    axes.set_ylabel(label)
    axes.legend(loc="best", labelcolor=INK)
    if title:
        axes.set_title(title)
    return figure
