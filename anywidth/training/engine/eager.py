"""The plain engine: every width forward and backward as PyTorch does it, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.slimming.convert import at_width
from anywidth.training.engine.passes import Objective, detached
from anywidth.width import ChannelConfig


class EagerEngine:
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, objective: Objective
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.objective = objective

    def gradients(
        self,
        configs: Sequence[ChannelConfig],
        weights: Sequence[float],
        inputs: Any,
        targets: Any,
    ) -> tuple[list[Tensor], list[Any]]:
        """Leaves the summed gradients of all widths in the parameters; returns losses, outputs."""
        # Those the optimiser does not hold would pile up, and count where all are clipped.
        self.model.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        outputs: list[Any] = []
        for config, weight in zip(configs, weights, strict=True):
            teacher = outputs[0] if outputs else None
            # Backward too: checkpointed activations are computed anew there.
            with at_width(self.model, config):
                loss, output = self.objective.forward(self.model, config, inputs, targets, teacher)
                (loss if weight == 1 else weight * loss).backward()
            losses.append(loss.detach())
            outputs.append(detached(output))
        return losses, outputs
