"""One training step over all sampled widths: algorithm 1 of the paper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.convert import at_width
from anywidth.distillation import soft_cross_entropy
from anywidth.distributed import average_gradients
from anywidth.errors import AnywidthError
from anywidth.sampling import Sampling, sample_widths
from anywidth.state import state_of
from anywidth.width import ChannelConfig

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one step did, on the device: nothing here was read back yet.

    Args:
        widths: the configurations visited, widest first.
        losses: the loss at each of them.
        outputs: the network's output at each of them, without gradients.
    """

    widths: list[ChannelConfig]
    losses: list[Tensor]
    outputs: list[Any]


class SandwichStep:
    """Trains a converted network at several widths on one batch.

    A call clears the gradients, runs the full width on the true targets, runs each narrower width
    on the full width's detached predictions, accumulates all their gradients, averages them over
    ranks once, and lets the optimiser take its step. It never waits for the device.

    Args:
        model: a converted network, in training mode.
        optimizer: of the model's parameters.
        loss: (output, targets) → scalar, for the full width.
        distill: (output, full width's output) → scalar, for narrower widths. None trains every
            width on the true targets.
        widths: how many widths a step, for the sandwich rule; or a `Sampling` for any other.
        truth: how much of the narrower widths' loss is the true targets' (0 in the paper, which
            found mixing worse).
        seed: widths are drawn from this and the step's number.
        autocast: run forward passes in this dtype, as `torch.autocast` does.
        after_backward: called once the gradients are complete, before the optimiser's step: to
            clip them, say.

    Example:
        >>> step = anywidth.SandwichStep(model, optimizer, loss=F.cross_entropy)
        >>> for images, labels in loader:
        ...     step(images, labels)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        distill: Loss | None = soft_cross_entropy,
        widths: int | Sampling = 4,
        *,
        truth: float = 0.0,
        seed: int = 0,
        autocast: torch.dtype | None = None,
        after_backward: Callable[[], None] | None = None,
    ) -> None:
        state_of(model)
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.distill = distill
        if isinstance(widths, int):
            widths = Sampling(count=widths, seed=seed)
        self.sampling = widths
        self.truth = truth
        self.autocast = autocast
        self.after_backward = after_backward
        self.count = 0
        if not 0 <= truth <= 1:
            raise AnywidthError(f"truth={truth}: expected a share from 0 to 1")
        if distill is not None and self.sampling.rule in ("random", "min+random"):
            raise AnywidthError(
                f"the rule {self.sampling.rule!r} leaves out the widest width, so there is nothing "
                "to distill from: pass distill=None"
            )

    def __call__(self, inputs: Any, targets: Any) -> StepResult:
        """One step; `self.count` is its number, from which its widths are drawn."""
        configs = sample_widths(self.model, self.count, self.sampling)
        if not self.model.training:
            self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        outputs: list[Any] = []
        for config in configs:
            teacher = outputs[0] if outputs and self.distill is not None else None
            loss, output = self._forward(config, inputs, targets, teacher)
            loss.backward()
            losses.append(loss.detach())
            outputs.append(_detach(output))
        average_gradients(self.model.parameters())
        if self.after_backward is not None:
            self.after_backward()
        self.optimizer.step()
        self.count += 1
        return StepResult(configs, losses, outputs)

    def _forward(
        self, config: ChannelConfig, inputs: Any, targets: Any, teacher: Any
    ) -> tuple[Tensor, Any]:
        with at_width(self.model, config), self._precision(inputs):
            output = self.model(inputs)
            if teacher is None or self.distill is None:
                return self.loss(output, targets), output
            loss = self.distill(output, teacher)
            if self.truth > 0:
                loss = (1 - self.truth) * loss + self.truth * self.loss(output, targets)
            return loss, output

    def _precision(self, inputs: Any) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        device = inputs.device.type if isinstance(inputs, Tensor) else "cpu"
        return torch.autocast(device, self.autocast)


def _detach(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, tuple | list):
        return type(output)(_detach(item) for item in output)
    return output
