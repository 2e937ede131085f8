"""The widths of a training step: the sandwich rule, and the rules it is compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from anywidth.errors import AnywidthError
from anywidth.planning.groups import Plan
from anywidth.seeds import derive_seed
from anywidth.slimming.state import state_of
from anywidth.width import ChannelConfig, Width, whole_number, width_list

Rule = Literal["sandwich", "random", "min+random", "max+random", "fixed"]


@dataclass(frozen=True)
class Sampling:
    """How the widths of a step are drawn.

    Args:
        rule: `"sandwich"` (the paper's rule: the widest, the narrowest, the rest random),
            `"random"`, `"min+random"`, `"max+random"` (table 2 of the paper), or `"fixed"`:
            always `widths` (the switches of a slimmable network, or the one width of an
            individually trained network).
        count: widths per step (the paper's n).
        nonuniform: every group draws its own fraction.
        lattice: draw from this number of evenly spread configurations instead of from all, so
            that a GPU captures fewer graphs. Channels that are always trained together may come
            to depend on each other: a width between two trained ones can then fail.
        widths: the widths of the rule `"fixed"`.
        seed: draws depend only on this and the step's number, so all ranks draw the same.
    """

    rule: Rule = "sandwich"
    count: int = 4
    nonuniform: bool = False
    lattice: int | None = None
    widths: tuple[Width, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise AnywidthError(f"rule {self.rule!r}: expected one of {get_args(Rule)}")
        has_widths = not isinstance(self.widths, Sized) or len(self.widths) > 0
        if self.rule == "fixed":
            if not has_widths:
                raise AnywidthError("the rule 'fixed' needs widths=(...)")
            object.__setattr__(self, "widths", tuple(width_list(self.widths, "Sampling")))
        elif has_widths:
            raise AnywidthError(
                f"widths={self.widths!r}: the rule {self.rule!r} draws its own widths; for fixed "
                'widths use Sampling("fixed", widths=...)'
            )
        least = {"sandwich": 2, "fixed": 0}.get(self.rule, 1)
        if whole_number(self.count) is None or self.count < least:
            raise AnywidthError(
                f"{self.count!r} widths per step: the rule {self.rule!r} needs at least {least}"
            )
        size = self.lattice
        if size is not None and (self.nonuniform or whole_number(size) is None or size < 2):
            raise AnywidthError(
                f"lattice={self.lattice!r}: expected at least 2, and only without nonuniform=True"
            )


def sample_widths(
    model: nn.Module | Plan, step: int, sampling: Sampling | None = None
) -> list[ChannelConfig]:
    """The configurations of training step number `step`; if the widest is drawn, it is first.

    Example:
        >>> for config in anywidth.sample_widths(model, step):
        ...     with anywidth.at_width(model, config):
        ...         criterion(model(images), labels).backward()
    """
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise AnywidthError(
            f"sampling={sampling!r}: expected a Sampling, such as Sampling(count=4)"
        )
    plan = model if isinstance(model, Plan) else state_of(model).plan
    if sampling.rule == "fixed":
        return [plan.resolve(width) for width in _widest_first(plan, sampling.widths)]
    ends = {
        "sandwich": [plan.widest, plan.narrowest],
        "max+random": [plan.widest],
        "min+random": [plan.narrowest],
        "random": [],
    }[sampling.rule]
    chance = random.Random(derive_seed("widths", sampling.seed, step))
    number = sampling.count - len(ends)
    if sampling.lattice is not None:
        source = model if isinstance(model, Plan) else state_of(model)
        return ends + chance.choices(source.lattice(sampling.lattice), k=number)
    return ends + [_draw(plan, sampling.nonuniform, chance) for _ in range(number)]


def _draw(plan: Plan, nonuniform: bool, chance: random.Random) -> ChannelConfig:
    low, high = plan.widths.low, plan.widths.high
    if nonuniform:
        fractions = {group.name: chance.uniform(low, high) for group in plan.elastic()}
        return plan.resolve(fractions)
    return plan.resolve(chance.uniform(low, high))


def _widest_first(plan: Plan, widths: Sequence[Width]) -> list[Width]:
    return sorted(widths, key=lambda w: -sum(n for _, n in plan.resolve(w).items()))
