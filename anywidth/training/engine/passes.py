"""One pass of a training step: forward at one width, its loss, and its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.slimming.convert import at_width
from anywidth.training.distillation import Distill, WithTargets
from anywidth.training.engine.trees import call, leaves, map_tensors
from anywidth.width import ChannelConfig

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Objective:
    """The objective of the widths of a step.

    Args:
        loss: (output, targets) → scalar.
        distill: (output, widest output) → scalar for the narrower widths; None uses `loss`.
            In `WithTargets` it gets the targets too.
        truth: share of `loss` in the objective of narrower widths.
        autocast: dtype of forward passes; None changes nothing.
    """

    loss: Loss
    distill: Distill | None
    truth: float
    autocast: torch.dtype | None

    def forward(
        self, model: nn.Module, config: ChannelConfig, inputs: Any, targets: Any, teacher: Any
    ) -> tuple[Tensor, Any]:
        """(loss, output) at one width; `teacher` is the widest width's output, or None."""
        with at_width(model, config), self._precision(inputs):
            output = call(model, inputs)
            if teacher is None or self.distill is None:
                return checked_scalar(self.loss(output, targets), "loss"), output
            if isinstance(self.distill, WithTargets):
                loss = self.distill.function(output, teacher, targets)
            else:
                loss = self.distill(output, teacher)
            loss = checked_scalar(loss, "distill")
            if self.truth > 0:
                loss = (1 - self.truth) * loss + self.truth * self.loss(output, targets)
            return loss, output

    def _precision(self, inputs: Any) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        devices = [leaf.device.type for leaf in leaves(inputs) if isinstance(leaf, Tensor)]
        device = devices[0] if devices else "cpu"
        # A cached cast would belong to one graph and be read by another.
        return torch.autocast(device, self.autocast, cache_enabled=False)


def trained_parameters(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> list[nn.Parameter]:
    """The network's parameters, and others that the optimizers hold, such as a loss's own."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = [parameter for group in groups for parameter in group["params"]]
    return list(dict.fromkeys([*model.parameters(), *held]))


def checked_scalar(loss: Any, name: str) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    hint = "; of (loss, logs), return the loss alone" if isinstance(loss, tuple) else ""
    raise AnywidthError(f"{name} returned {found}: expected a scalar tensor{hint}")


def detached(output: Any) -> Any:
    """The same output without gradients."""
    return map_tensors(Tensor.detach, output)
