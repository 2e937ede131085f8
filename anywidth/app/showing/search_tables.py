"""A search as tables for a terminal: what was found per budget, and the channels of each group."""

from __future__ import annotations

from collections.abc import Mapping

from anywidth.app.showing.spectrum_tables import BlockTable, Column, FittedTable, format_metric
from anywidth.measuring.spectra import Metric
from anywidth.planning.groups import Plan
from anywidth.searching.budgets import shown_cost
from anywidth.searching.found import Judged, SearchResult


def found_table(result: SearchResult, described: Mapping[str, Metric]) -> FittedTable:
    """One row per budget: the uniform width and what was found, with cost and metrics."""
    names = [name for name in result.found[0].best.metrics if name in described]
    pairs = [(one.uniform, one.best) for one in result.found]

    def costs(side: int, title: str) -> Column:
        cells = [shown_cost(result.kind, pair[side].cost).split(" ")[0] for pair in pairs]
        return Column(title, cells)

    def metric(side: int, title: str, name: str) -> Column:
        def cell(judged: Judged) -> str:
            return format_metric(judged.metrics.get(name), described[name])

        return Column(f"{title}: {described[name].label}", [cell(pair[side]) for pair in pairs])

    budget = Column("budget", [str(one.budget) for one in result.found])
    main = [metric(side, title, result.metric) for side, title in enumerate(("uniform", "found"))]
    others = [
        metric(side, title, name)
        for name in names
        if name != result.metric
        for side, title in enumerate(("uniform", "found"))
    ]
    spent = [costs(0, "uniform costs"), costs(1, "found costs")]
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
