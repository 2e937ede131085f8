"""Gradients are used by one step of an optimizer: never twice, and never dropped unused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError

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
