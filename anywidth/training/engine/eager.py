"""The eager engine: plain forward and backward passes for every width, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from anywidth.slimming.convert import at_width
from anywidth.training.engine.passes import Objective, detached
from anywidth.width import ChannelConfig


class EagerEngine:
    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self.model = model
        self.objective = objective

    def add_gradients(
        self,
        configs: Sequence[ChannelConfig],
        weights: Sequence[float | Tensor],
        inputs: Any,
        targets: Any,
        teacher: Any = None,
    ) -> tuple[list[Tensor], list[Any]]:
        """Add the gradients of all widths to the parameters' gradients; return losses, outputs.

        Narrower widths learn from `teacher`, an output; if it is None, from that of the widest.
        """
        losses: list[Tensor] = []
        outputs: list[Any] = []
        for config, weight in zip(configs, weights, strict=True):
            taught = (outputs[0] if teacher is None else teacher) if outputs else None
            # Backward too, because it recomputes checkpointed activations.
            with at_width(self.model, config):
                loss, output = self.objective.forward(self.model, config, inputs, targets, taught)
                is_plain = isinstance(weight, float) and weight == 1
                (loss if is_plain else weight * loss).backward()
            losses.append(loss.detach())
            outputs.append(detached(output))
        return losses, outputs
