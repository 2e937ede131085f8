"""One pass of a training step: forward at one width, its loss, and its gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.planning.model_outputs import is_cache
from anywidth.slimming.convert import at_width
from anywidth.training.distillation import Distill, extras_of
from anywidth.training.engine.trees import call, leaves, map_tensors
from anywidth.training.gpu.fast_paths import no_norm_lost
from anywidth.width import ChannelConfig

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Objective:
    """The objective of the widths of a step.

    Args:
        loss: (output, targets) → scalar.
        distill: (output, teacher's output) → scalar for the narrower widths; None uses `loss`.
        truth: share of `loss` in the objective of narrower widths.
        autocast: dtype of forward passes; None changes nothing.
    """

    loss: Loss
    distill: Distill | None
    truth: float
    autocast: torch.dtype | None
    extras: tuple[str, ...] = field(init=False)  # of the distillation

    def __post_init__(self) -> None:
        asked = () if self.distill is None else extras_of(self.distill)
        object.__setattr__(self, "extras", asked)

    def forward(
        self, model: nn.Module, config: ChannelConfig, inputs: Any, targets: Any, teacher: Any
    ) -> tuple[Tensor, Any]:
        """(loss, output) at one width; `teacher` is the output to learn from, or None."""
        with at_width(model, config), self.precision(inputs):
            with no_norm_lost(model):
                output = call(model, inputs)
            if teacher is None or self.distill is None:
                return checked_scalar(self.loss(output, targets), "loss"), output
            known = {"targets": targets, "config": config}
            extras = {name: known[name] for name in self.extras}
            loss = checked_scalar(self.distill(output, teacher, **extras), "distill")
            if self.truth > 0:
                loss = (1 - self.truth) * loss + self.truth * self.loss(output, targets)
            return loss, output

    def precision(self, inputs: Any) -> contextlib.AbstractContextManager[Any]:
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
    """The same output without gradients, and without caches, which would keep them.

    Keys and values for a next token are of no use after a training pass.
    """
    if isinstance(output, MutableMapping) and any(is_cache(item) for item in output.values()):
        output = copy.copy(output)
        for key in [key for key, item in output.items() if is_cache(item)]:
            output[key] = None
    elif type(output) is tuple:
        output = tuple(None if is_cache(item) else item for item in output)
    return map_tensors(Tensor.detach, output)
