"""What a searched network may cost: multiply-adds, parameters, or milliseconds on a device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, get_args

from anywidth.errors import AnywidthError
from anywidth.measuring.cost import parameter_count
from anywidth.planning.groups import Plan
from anywidth.searching.choices import Cost
from anywidth.searching.latency_table import LatencyTable
from anywidth.width import is_number

CostKind = Literal["macs", "parameters", "milliseconds"]

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_TIMES = {"ms": 1.0, "s": 1e3, "us": 1e-3}


@dataclass(frozen=True)
class Budget:
    """The most that a network may cost.

    Args:
        kind: `"macs"` (multiply-adds of one example), `"parameters"`, or `"milliseconds"` (of one
            forward pass of one example on this device).
        amount: how many of them.

    Example:
        >>> Budget("macs", 150e6)
        >>> Budget.parse("milliseconds", "5ms")
    """

    kind: CostKind
    amount: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(CostKind):
            raise AnywidthError(f"a budget of {self.kind!r}: expected one of {get_args(CostKind)}")
        if not is_number(self.amount) or self.amount <= 0:
            raise AnywidthError(
                f"a budget of {self.amount!r} {self.kind}: expected a number above 0"
            )

    @staticmethod
    def parse(kind: CostKind, text: str) -> Budget:
        """A budget as a command line gives it: `150M`, `1.5G`, `250k`, or `5ms`."""
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
        units, example = (_TIMES, "5ms") if kind == "milliseconds" else (_COUNTS, "150M")
        if found is None or found[2] not in units:
            raise AnywidthError(
                f"a budget of {text!r}: expected a number with one of the units "
                f"{', '.join(filter(None, units))}, such as {example}"
            )
        # In decimals: 2.01 * 1e6 is less than 2,010,000, which a network may cost.
        return Budget(kind, float(Decimal(found[1]) * Decimal(str(units[found[2]]))))

    def __str__(self) -> str:
        return shown_cost(self.kind, self.amount)


def shown_cost(kind: CostKind, amount: float, digits: int | None = None) -> str:
    """A cost as tables show it: `150M multiply-adds`, `5 ms`."""
    if kind == "milliseconds":
        return f"{amount:.{digits or 3}g} ms"
    word = "multiply-adds" if kind == "macs" else "parameters"
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if amount >= factor:
            return f"{amount / factor:.{digits or 4}g}{unit} {word}"
    return f"{amount:.{digits or 4}g} {word}"


def cost_of(kind: CostKind, plan: Plan, latencies: LatencyTable | None) -> Cost:
    """The function that gives a configuration's cost."""
    if kind == "macs":
        return plan.macs
    if kind == "parameters":
        return lambda config: parameter_count(plan, config)
    if latencies is None:
        raise AnywidthError(
            "a budget in milliseconds needs a latency table of this device: pass "
            "latencies=anywidth.measure_latencies(model)"
        )
    latencies.check_plan(plan)
    return latencies.predict


def check_reachable(budget: Budget, cheapest: float, dearest: float) -> None:
    """A clear error for a budget below the narrowest network or above the widest."""
    if budget.amount < cheapest:
        raise AnywidthError(
            f"a budget of {budget}: even the narrowest network costs "
            f"{shown_cost(budget.kind, cheapest)}; allow that much, or train with a lower bound"
        )
    if budget.amount > dearest:
        raise AnywidthError(
            f"a budget of {budget}: the widest network costs only "
            f"{shown_cost(budget.kind, dearest)}; choose a smaller budget"
        )
