"""The widths of a training step: the sandwich rule and others; and the weights of their losses."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from anywidth.errors import AnywidthError
from anywidth.planning.groups import Plan
from anywidth.slimming.convert import plan_of
from anywidth.slimming.converted_part import network_in
from anywidth.slimming.state import state_of
from anywidth.training.seeds import derive_seed
from anywidth.width import ChannelConfig, Width, check_whole, is_number, whole_number, width_list

Rule = Literal["sandwich", "random", "min+random", "max+random", "fixed"]
Density = Literal["uniform", "log-uniform"]
NamedRule = Literal["paper", "balanced"]
WeightRule = Callable[[ChannelConfig, int, int], float]
WidthWeights = NamedRule | Sequence[float] | WeightRule


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
        lattice: draw from this number of configurations instead of from all, so that a GPU can
            capture a graph of each. Uniform ones are evenly spread. Channels that are always
            trained together may come to depend on each other: a width between two trained ones
            can then fail. Nonuniform ones are drawn once, by `seed`, such that each group has all
            of its widths equally often; take hundreds of them.
        widths: the widths of the rule `"fixed"`.
        seed: draws depend only on this and the step's number, so all ranks draw the same.
        density: how random widths are spread over the range: `"uniform"` (the paper), or
            `"log-uniform"`, which draws between 0.1 and 0.2 as often as between 0.2 and 0.4, and
            so trains narrow widths more often. Steps are cheaper, too.
    """

    rule: Rule = "sandwich"
    count: int = 4
    nonuniform: bool = False
    lattice: int | None = None
    widths: tuple[Width, ...] = ()
    seed: int = 0
    density: Density = "uniform"

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
        if self.lattice is not None:
            check_whole(self.lattice, 2, "lattice")
        if self.density not in get_args(Density):
            raise AnywidthError(f"density={self.density!r}: expected one of {get_args(Density)}")
        if self.density != "uniform" and self.rule == "fixed":
            raise AnywidthError(
                f"density={self.density!r} has no effect with the rule 'fixed', which draws nothing"
            )

    def configurations(self, model: nn.Module | Plan) -> list[ChannelConfig]:
        """The configurations that `lattice` allows, cheapest first; raises without one."""
        if self.lattice is None:
            raise AnywidthError("Sampling(lattice=None) draws from all configurations")
        if isinstance(model, Plan):
            return self._spread_over(model)
        return state_of(network_in(model)).cached(self, self._spread_over)

    def _spread_over(self, plan: Plan) -> list[ChannelConfig]:
        return _spread(plan, self) if self.nonuniform else plan.lattice(self.lattice)

    @property
    def may_leave_out_widest(self) -> bool:
        """Whether some steps do not train the widest width, from which others could learn."""
        return self.rule in ("random", "min+random")


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
    plan = model if isinstance(model, Plan) else plan_of(model)
    if sampling.rule == "fixed":
        configs = [plan.resolve(width) for width in sampling.widths]
        return sorted(configs, key=lambda config: -sum(n for _, n in config.items()))
    ends = {
        "sandwich": [plan.widest, plan.narrowest],
        "max+random": [plan.widest],
        "min+random": [plan.narrowest],
        "random": [],
    }[sampling.rule]
    chance = random.Random(derive_seed("widths", sampling.seed, step))
    number = sampling.count - len(ends)
    if sampling.lattice is None:
        return ends + [_draw(plan, sampling, chance) for _ in range(number)]
    known = sampling.configurations(model)
    if sampling.density == "uniform" or sampling.nonuniform:  # these have the density themselves
        return ends + chance.choices(known, k=number)
    low, span = plan.widths.low, max(plan.widths.high - plan.widths.low, 1e-9)
    places = ((_width(plan, sampling, chance.random()) - low) / span for _ in range(number))
    return ends + [known[round(place * (len(known) - 1))] for place in places]


def _draw(plan: Plan, sampling: Sampling, chance: random.Random) -> ChannelConfig:
    if not sampling.nonuniform:
        return plan.resolve(_width(plan, sampling, chance.random()))
    groups = plan.elastic()
    return plan.resolve({g.name: _width(plan, sampling, chance.random()) for g in groups})


def _width(plan: Plan, sampling: Sampling, share: float) -> float:
    """The width below which this share of all draws lies."""
    low, high = plan.widths.low, plan.widths.high
    if sampling.density == "uniform":
        return low + (high - low) * share
    return min(low * (high / low) ** share, high)


def _spread(plan: Plan, sampling: Sampling) -> list[ChannelConfig]:
    """Nonuniform configurations in which every group goes evenly through its widths.

    A Latin hypercube: each group has one width from each equal part of the draws, in an order of
    its own.
    """
    chance = random.Random(derive_seed("configurations", sampling.seed))
    count = sampling.lattice or 0
    widths = {
        group.name: [
            _width(plan, sampling, (place + chance.random()) / count)
            for place in chance.sample(range(count), count)
        ]
        for group in plan.elastic()
    }
    rows = ({name: one[i] for name, one in widths.items()} for i in range(count))
    return sorted(dict.fromkeys(map(plan.resolve, rows)), key=plan.macs)


# ---- weights ---------------------------------------------------------------------------------


def width_weights(weights: WidthWeights, configs: Sequence[ChannelConfig]) -> list[float]:
    """One weight per width of a step, in the order of `configs`; the widest comes first.

    With the paper's sum, layers that all widths share (a classifier, norms) learn mostly from the
    three narrow widths. `"balanced"` gives these together the weight of the widest.
    """
    number = len(configs)
    if weights == "paper":
        return [1.0] * number
    if weights == "balanced":
        return [1.0, *[1.0 / (number - 1)] * (number - 1)] if number > 1 else [1.0]
    if callable(weights):
        found = [weights(config, position, number) for position, config in enumerate(configs)]
    else:
        found = list(weights)
        if len(found) != number:
            raise AnywidthError(
                f"weights={found}: {len(found)} weights for {number} widths per step; pass one per "
                f"width, the widest first, or one of {get_args(NamedRule)}"
            )
    for position, weight in enumerate(found):
        if not is_number(weight) or weight < 0:
            raise AnywidthError(
                f"weights: {weight!r} for width number {position} of a step: expected a number of "
                "at least 0"
            )
    if math.fsum(found) == 0:
        raise AnywidthError("weights: all are 0, so nothing would be trained")
    return [float(weight) for weight in found]


def checked_weights(weights: Any, sampling: Sampling) -> WidthWeights:
    """The rule to use; an invalid one is refused. A function's results are checked at each step."""
    if weights is None:
        return "paper" if sampling.may_leave_out_widest else "balanced"
    if hasattr(weights, "tolist"):  # an array or a tensor
        weights = weights.tolist()
    if weights == "balanced" and sampling.may_leave_out_widest:
        raise AnywidthError(
            f"weights='balanced': the rule {sampling.rule!r} may leave out the widest width, "
            "against which the others are balanced; use the rule 'sandwich', or weights='paper'"
        )
    is_list = isinstance(weights, Sequence) and not isinstance(weights, str)
    if weights in get_args(NamedRule) or callable(weights) or is_list:
        rule: WidthWeights = weights
        return rule
    raise AnywidthError(
        f"weights={weights!r}: expected one of {get_args(NamedRule)}, one number per width, or a "
        "function of (configuration, position, number of widths)"
    )
