"""What a search found: the front along its way, and one configuration per budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anywidth.errors import errors_about
from anywidth.json_values import any_number, flag, listed, mapped, number, record, text, whole
from anywidth.searching.budgets import Budget, CostKind
from anywidth.width import ChannelConfig

_VERSION = 1


@dataclass(frozen=True)
class Judged:
    """A configuration, what it costs and how good it is."""

    channels: ChannelConfig
    cost: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Found:
    """The best configuration within one budget.

    Args:
        budget: the most it may cost.
        best: the configuration, calibrated and judged exactly.
        uniform: the widest uniform width within the budget, judged in the same way.
        is_measured: whether the costs are milliseconds that were measured, not predicted.
    """

    budget: Budget
    best: Judged
    uniform: Judged
    is_measured: bool = False

    @property
    def is_uniform(self) -> bool:
        """Whether nothing better than the uniform width was found."""
        return self.best.channels == self.uniform.channels


@dataclass(frozen=True)
class SearchResult:
    """What `search` returns.

    Args:
        metric: the metric that was searched by.
        kind: what the budgets count.
        found: one entry per budget, in the order they were given.
        front: the configurations that greedy slimming passed, the widest first, with their metric
            by batch statistics.
        uniform: uniform widths of these costs, judged in the same way, the narrowest first.
        passes: how many configurations were evaluated.
        is_complete: false if the search was interrupted.
        load: how many times as long networks took when the finalists were measured as when the
            latency table was. All costs are in the table's milliseconds.
    """

    metric: str
    kind: CostKind
    found: tuple[Found, ...]
    front: tuple[Judged, ...]
    uniform: tuple[Judged, ...]
    passes: int
    is_complete: bool = True
    load: float = 1.0

    def to_json(self) -> dict[str, Any]:
        return {"version": _VERSION, **{name: _plain(value) for name, value in vars(self).items()}}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> SearchResult:
        with errors_about("not the result of a search"):
            fields = _RESULT(data, "")
        del fields["version"], fields["about"]
        kind = fields["kind"]
        found = tuple(
            Found(Budget(kind, one["budget"]), one["best"], one["uniform"], one["is_measured"])
            for one in fields["found"]
        )
        lists = {name: tuple(fields[name]) for name in ("front", "uniform")}
        return SearchResult(**{**fields, **lists, "found": found})


def _plain(value: Any) -> Any:
    """A field of a result as JSON data."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Found | Judged):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, Budget):
        return value.amount
    return value.to_json() if isinstance(value, ChannelConfig) else value


_JUDGED = record(
    {"channels": ChannelConfig.from_json, "cost": number, "metrics": mapped(any_number)}
)


def _judged(value: Any, at: str) -> Judged:
    return Judged(**_JUDGED(value, at))


_RESULT = record(
    {
        "version": whole(_VERSION, _VERSION),
        "metric": text,
        "kind": text,
        "found": listed(
            record({"budget": number, "best": _judged, "uniform": _judged, "is_measured": flag})
        ),
        "front": listed(_judged),
        "uniform": listed(_judged),
        "passes": whole(0),
        "is_complete": flag,
        "load": number,
        "about": lambda value, at: value,
    },
    # What a program notes beside it, such as the run that was searched.
    {"about": None, "load": 1.0},
)
