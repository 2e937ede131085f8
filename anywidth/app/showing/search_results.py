"""A search as tables for a terminal, and as a plot against the uniform widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from anywidth.app.showing.figure_style import BLUE, GREY, INK, ORANGE
from anywidth.app.showing.spectrum_tables import BlockTable, Column, FittedTable, format_metric
from anywidth.measuring.spectra import Metric
from anywidth.planning.groups import Plan
from anywidth.searching.budgets import shown_cost
from anywidth.searching.found import Judged, SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def found_table(result: SearchResult, described: Mapping[str, Metric]) -> FittedTable:
    """One row per budget: the uniform width and what was found, with cost and metrics."""
    sides = {"uniform": [one.uniform for one in result.found]}
    sides["found"] = [one.best for one in result.found]

    def costs(side: str) -> Column:
        found = (shown_cost(result.kind, judged.cost) for judged in sides[side])
        return Column(f"{side} costs", [text.split(" ")[0] for text in found])

    def values(side: str, name: str) -> Column:
        found = (judged.metrics.get(name) for judged in sides[side])
        cells = [format_metric(value, described[name]) for value in found]
        return Column(f"{side}: {described[name].label}", cells)

    budget = Column("budget", [str(one.budget) for one in result.found])
    spent = [costs(side) for side in sides]
    main = [values(side, result.metric) for side in sides]
    names = [n for n in sides["found"][0].metrics if n in described and n != result.metric]
    others = [values(side, name) for name in names for side in sides]
    columns = [budget, *spent, *main, *others]
    return FittedTable("", columns, [budget, main[1], main[0], *spent, *others], "search.json")


def channels_table(result: SearchResult, plan: Plan) -> BlockTable:
    """One row per group that can narrow, one column per budget beside the whole network."""
    groups = plan.elastic()
    columns = [Column("full", [str(group.channels) for group in groups])]
    for one in result.found:
        for title, judged in (("uniform", one.uniform), ("found", one.best)):
            cells = [str(judged.channels[group.name]) for group in groups]
            columns.append(Column(f"{one.budget}\n{title}", cells))
    return BlockTable("channels", Column("group", [group.name for group in groups]), columns)


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
