"""Inplace distillation: narrower widths learn from the predictions of the full width."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.errors import AnywidthError


def soft_cross_entropy(
    logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, kept: Tensor | None = None
) -> Tensor:
    """Cross entropy against the soft labels of the full width (the paper's inplace distillation).

    Classes are axis 1, as in `torch.nn.functional.cross_entropy`; further axes are allowed.
    `teacher_logits` must have no gradient, so that the loss of a narrow width does not reach the
    full width's output. With a temperature other than the paper's 1, the loss is scaled by its
    square, so that gradients keep their size. `kept` is a mask of the logits' shape without
    classes: only entries where it is true count.
    """
    for given in (logits, teacher_logits):
        if not isinstance(given, Tensor):
            raise AnywidthError(
                f"soft_cross_entropy(): output of type {type(given).__name__}: expected logits; "
                "pass distill=..., a function of (output, full width's output)"
            )
    if logits.shape != teacher_logits.shape:
        raise AnywidthError(
            f"soft_cross_entropy(): logits of shape {tuple(logits.shape)} and teacher_logits of "
            f"shape {tuple(teacher_logits.shape)}: expected the same, (batch, classes, ...)"
        )
    if not 0 < temperature < math.inf:
        raise AnywidthError(
            f"soft_cross_entropy(temperature={temperature}): expected a number above 0"
        )
    classes = 1 if teacher_logits.dim() > 1 else 0
    if logits.dim() > 0 and logits.shape[classes] == 1:
        raise AnywidthError(
            f"soft_cross_entropy(): logits of shape {tuple(logits.shape)} have only one class, so "
            "nothing can be learned: pass distill=F.mse_loss for numbers, or distill=None"
        )
    soft_labels = F.softmax(teacher_logits / temperature, dim=classes)
    if kept is not None:
        soft_labels = soft_labels * kept.unsqueeze(classes)
    loss = F.cross_entropy(logits / temperature, soft_labels)
    if kept is not None:
        loss = loss * (kept.numel() / kept.sum())
    return loss if temperature == 1.0 else loss * temperature**2


Distill = Callable[..., Tensor]
"""(output, teacher's output) → scalar, perhaps with further arguments: those of `extras_of`."""

_EXTRAS = ("targets", "config")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def extras_of(distill: Distill) -> tuple[str, ...]:
    """What a distillation gets besides two outputs: its further arguments of known names.

    An argument with a default gets it too: the default would silently take its place.
    """
    function = distill.forward if isinstance(distill, nn.Module) else distill
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin function does not say
        return ()
    for third in [p for p in parameters if p.kind in _POSITIONAL and p.default is p.empty][2:]:
        raise AnywidthError(
            f"distill takes {third.name!r} as a third positional argument: expected (output, "
            "teacher's output), and further arguments by keyword, as in def distill(output, "
            "teacher, *, targets)"
        )
    further = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    further += [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][2:]
    for one in further:
        if one.default is one.empty and one.name not in _EXTRAS:
            raise AnywidthError(
                f"distill needs a keyword argument {one.name!r}: it may ask for "
                f"{' and '.join(_EXTRAS)}; give others a default, or use functools.partial"
            )
    chosen = function.keywords if isinstance(function, functools.partial) else {}
    return tuple(p.name for p in further if p.name in _EXTRAS and p.name not in chosen)


def ignoring(distill: Callable[..., Tensor], index: int) -> Distill:
    """A `soft_cross_entropy` that ignores the target `index`, as the cross entropy of labels does.

    It may have a temperature.
    """

    def function(output: Any, full: Any, *, targets: Any) -> Tensor:
        are_classes = isinstance(targets, Tensor) and not targets.is_floating_point()
        return distill(output, full, kept=targets != index if are_classes else None)

    return function
