"""What happens around each step of an optimizer.

Gradients are used by one step: never twice, and never dropped unused. Channels that no width trains
are left alone: their gradients are zero, but weight decay would still shrink them at every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.distributed import is_sharded
from anywidth.errors import AnywidthError
from anywidth.planning.cuts import Cut, cut
from anywidth.planning.groups import Plan
from anywidth.slimming.state import tensor_owners
from anywidth.training.sampling import Sampling
from anywidth.width import ChannelConfig

Cuts = list[tuple[int, Cut]]
# On a gradient: (its version then, whether a whole step of ours used it).
_SPENT = "_anywidth_spent"


def watch(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Mark the gradients that these optimizers use, and refuse to use a step's gradients twice."""
    for optimizer in map(stepping, optimizers):
        optimizer.register_step_pre_hook(_refuse_twice)
        optimizer.register_step_post_hook(_note)


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    return _refuse_twice in stepping(optimizer)._optimizer_step_pre_hooks.values()


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that takes the steps: accelerate's holds it."""
    return getattr(optimizer, "optimizer", optimizer)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def mark_spent(parameters: Iterable[nn.Parameter], by_step: bool) -> None:
    for gradient in _gradients(parameters):
        setattr(gradient, _SPENT, (gradient._version, by_step))


def mark_fresh(parameters: Iterable[nn.Parameter]) -> None:
    """Unmark gradients that a graph has written, which does not change their version."""
    for gradient in _gradients(parameters):
        gradient.__dict__.pop(_SPENT, None)


@contextlib.contextmanager
def marks_kept(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep the marks of gradients that have the same values after a `with` block."""
    marks = [(gradient, _mark(gradient)) for gradient in _gradients(parameters)]
    try:
        yield
    finally:
        for gradient, mark in marks:
            if mark is not None:
                setattr(gradient, _SPENT, (gradient._version, mark[1]))


def check_spent(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse to clear gradients that no optimizer has used."""
    for gradient in _gradients(parameters):
        if _mark(gradient) is None and gradient.any():
            raise AnywidthError(
                "there are gradients that no optimizer has used, and a step begins by clearing "
                "all: to accumulate, call step.backward(inputs, targets) and then "
                "optimizer.step() yourself; otherwise call optimizer.zero_grad() before"
            )


def _refuse_twice(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    marks = [_mark(gradient) for gradient in _gradients(parameters_of(optimizer))]
    if marks and all(mark is not None and mark[1] for mark in marks):
        raise AnywidthError(
            "the optimizer would take a second step with the same gradients: step(inputs, targets) "
            "has already taken it. If something else calls the optimizer, such as Hugging Face's "
            "Trainer or Lightning, call step.backward(inputs, targets)"
        )


def _note(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    mark_spent(parameters_of(optimizer), by_step=False)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _mark(gradient: Tensor) -> tuple[int, bool] | None:
    """The mark of a gradient, unless the gradient has changed since."""
    mark: tuple[int, bool] | None = getattr(gradient, _SPENT, None)
    return mark if mark is not None and mark[0] == gradient._version else None


# ---- untrained channels ------------------------------------------------------------------------


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
