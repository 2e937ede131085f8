"""Gradients that an optimiser has stepped with: never used twice, and others never dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError

# On a gradient: (its version then, whether a whole step of ours used it).
_SPENT = "_anywidth_spent"


def watch(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Marks the gradients that these use from now on, and refuses to use ours once more."""
    for optimizer in optimizers:
        # accelerate's optimiser holds the one that steps.
        stepping = getattr(optimizer, "optimizer", optimizer)
        stepping.register_step_pre_hook(_refuse_twice)
        stepping.register_step_post_hook(_note)


def mark_spent(parameters: Iterable[nn.Parameter], by_step: bool) -> None:
    for gradient in _gradients(parameters):
        setattr(gradient, _SPENT, (gradient._version, by_step))


def mark_fresh(parameters: Iterable[nn.Parameter]) -> None:
    """For gradients that a graph has written: that does not change their version."""
    for gradient in _gradients(parameters):
        gradient.__dict__.pop(_SPENT, None)


def check_spent(parameters: Iterable[nn.Parameter]) -> None:
    """Refuses to clear gradients that no optimiser has used."""
    for gradient in _gradients(parameters):
        if _mark(gradient) is None and gradient.any():
            raise AnywidthError(
                "there are gradients that no optimizer has used, and a step begins by clearing "
                "all: to accumulate, call step.backward(inputs, targets) and then "
                "optimizer.step() yourself; otherwise call optimizer.zero_grad() before"
            )


def _refuse_twice(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    marks = [_mark(gradient) for gradient in _gradients(_parameters(optimizer))]
    if marks and all(mark is not None and mark[1] for mark in marks):
        raise AnywidthError(
            "the optimizer is to take a second step with the same gradients: step(inputs, targets) "
            "has taken it already. Where something else takes it, such as Hugging Face's Trainer "
            "or Lightning, call step.backward(inputs, targets)"
        )


def _note(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    mark_spent(_parameters(optimizer), by_step=False)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _mark(gradient: Tensor) -> tuple[int, bool] | None:
    """What was noted of a gradient, unless it has changed since."""
    mark: tuple[int, bool] | None = getattr(gradient, _SPENT, None)
    return mark if mark is not None and mark[0] == gradient._version else None
