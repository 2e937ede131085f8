"""What a search found: the front along its way, and one configuration per budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from anywidth.errors import AnywidthError
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
    """

    budget: Budget
    best: Judged
    uniform: Judged

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
        passes: how many configurations were evaluated.
        is_complete: false if the search was interrupted.
    """

    metric: str
    kind: CostKind
    found: tuple[Found, ...]
    front: tuple[Judged, ...]
    passes: int
    is_complete: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "metric": self.metric,
            "kind": self.kind,
            "found": [
                {
                    "budget": one.budget.amount,
                    "best": _judged_to_json(one.best),
                    "uniform": _judged_to_json(one.uniform),
                }
                for one in self.found
            ],
            "front": [_judged_to_json(one) for one in self.front],
            "passes": self.passes,
            "is_complete": self.is_complete,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> SearchResult:
        try:
            if data["version"] != _VERSION:
                raise ValueError(f"version {data['version']!r}")
            found = tuple(
                Found(
                    Budget(data["kind"], float(one["budget"])),
                    _judged(one["best"]),
                    _judged(one["uniform"]),
                )
                for one in data["found"]
            )
            front = tuple(_judged(one) for one in data["front"])
            return SearchResult(
                str(data["metric"]), data["kind"], found, front, int(data["passes"]),
                bool(data["is_complete"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AnywidthError(f"not the result of a search ({error})") from error


def _judged_to_json(one: Judged) -> dict[str, Any]:
    return {**asdict(one), "channels": one.channels.to_json()}


def _judged(data: Mapping[str, Any]) -> Judged:
    metrics = {str(name): float(value) for name, value in data["metrics"].items()}
    return Judged(ChannelConfig.from_json(data["channels"]), float(data["cost"]), metrics)
