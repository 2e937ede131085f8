"""The weights of the losses of a step's widths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from anywidth.errors import AnywidthError
from anywidth.training.sampling import Sampling
from anywidth.width import ChannelConfig, is_number

NamedRule = Literal["paper", "balanced"]
WeightRule = Callable[[ChannelConfig, int, int], float]
WidthWeights = NamedRule | Sequence[float] | WeightRule


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
