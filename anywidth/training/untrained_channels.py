"""Channels that no width of a step trains: the optimizer leaves them alone.

Their gradients are zero, but weight decay would still shrink them at every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.distributed import is_sharded
from anywidth.planning.cuts import Cut, cut
from anywidth.planning.groups import Plan
from anywidth.slimming.state import tensor_owners
from anywidth.training.sampling import Sampling
from anywidth.training.spent_gradients import parameters_of, stepping
from anywidth.width import ChannelConfig

Cuts = list[tuple[int, Cut]]


def leave_untrained_channels(
    network: nn.Module, plan: Plan, sampling: Sampling, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """After each step of the optimizers, restore the channels that no width trains."""
    trained = trained_channels(plan, sampling)
    if trained == plan.full:
        return
    partly: dict[nn.Parameter, Cuts] = {}
    for name, owner, key in tensor_owners(network, plan):
        parameter = owner._parameters.get(key)
        axes = [(i, cut(plan, axis, trained)) for i, axis in enumerate(plan.tensors[name]) if axis]
        if parameter is not None and axes and not is_sharded(parameter):
            partly[parameter] = axes
    for optimizer in map(stepping, optimizers):
        keeper = _Keeper(partly)
        optimizer.register_step_pre_hook(keeper.keep)
        optimizer.register_step_post_hook(keeper.restore)


def trained_channels(plan: Plan, sampling: Sampling) -> ChannelConfig:
    """The most channels of each group that any step trains."""
    if sampling.rule != "fixed":
        return plan.widest
    configs = [plan.resolve(width) for width in sampling.widths]
    return plan.full.replace({name: max(c[name] for c in configs) for name in plan.full})


class _Keeper:
    def __init__(self, partly: dict[nn.Parameter, Cuts]) -> None:
        self._partly = partly
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self._kept = [
            (values, values.clone(), gradient)
            for parameter in parameters_of(optimizer)
            if parameter in self._partly and parameter.grad is not None
            for values, gradient in zip(
                _outside(parameter.detach(), self._partly[parameter]),
                _outside(parameter.grad, self._partly[parameter]),
                strict=True,
            )
        ]

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        for values, before, gradient in self._kept:
            # The user's own loop may train them too.
            values.copy_(torch.where(gradient == 0, before, values))
        self._kept = []


def _outside(tensor: Tensor, cuts: Cuts) -> Iterator[Tensor]:
    """Views of all entries that are outside what is active, each entry once."""
    if not cuts:
        return
    (axis, active), *rest = cuts
    stretches = ((0, active),) if isinstance(active, int) else active
    place = 0
    for start, length in (*stretches, (tensor.shape[axis], 0)):
        if start > place:
            yield tensor.narrow(axis, place, start - place)
        if length:
            yield from _outside(tensor.narrow(axis, start, length), rest)
        place = start + length
