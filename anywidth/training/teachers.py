"""Teachers of the narrower widths of a step, other than the step's own full width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.planning.modes import evaluating
from anywidth.slimming.convert import at_width, plan_of
from anywidth.slimming.norm_statistics import batch_statistics, buffers_kept
from anywidth.training.engine.passes import Objective, detached
from anywidth.training.engine.trees import call, leaves
from anywidth.training.weight_average import WeightAverage

Teacher = Literal["full", "ema"] | nn.Module | Callable[..., Any]


@dataclass
class Teaching:
    """Runs the teacher of a step on its batches; `ema` averages the weights of `model`."""

    teacher: Teacher
    model: nn.Module
    ema: WeightAverage | None
    objective: Objective

    def __post_init__(self) -> None:
        teacher = self.teacher
        if not callable(teacher) and teacher not in ("full", "ema"):
            raise AnywidthError(
                f"teacher={teacher!r}: expected 'full', 'ema', a network, or a function of the "
                "network's inputs"
            )
        if teacher == "ema" and self.ema is None:
            raise AnywidthError(
                "teacher='ema' needs an average of the weights: pass ema_decay=0.997"
            )
        if teacher != "full" and self.objective.distill is None:
            raise AnywidthError(
                "a teacher is used by the distillation, and distill is None: pass distill=..., or "
                "leave the teacher out"
            )
        if teacher in list(self.model.modules()):
            raise AnywidthError(
                "the teacher is the network in training, or a part of it: leave it out to learn "
                "from the step's full width"
            )

    @torch.no_grad()
    def outputs(self, inputs: Any) -> Any:
        """The output of the teacher; None if it is the step's own full width."""
        if self.teacher == "full":
            return None
        with self.objective.precision(inputs):
            if isinstance(self.teacher, nn.Module):
                with evaluating(self.teacher):
                    return detached(call(self.teacher, inputs))
            if callable(self.teacher):
                arguments = inputs if isinstance(inputs, tuple) else (inputs,)
                return detached(self.teacher(*arguments))
            assert self.ema is not None
            network = self.ema.network
            # Running statistics would lag behind the weights.
            with batch_statistics(network), at_width(network, plan_of(network).widest):
                return detached(call(network, inputs))

    def check(self, inputs: Any) -> None:
        """Refuse a teacher whose output has another shape, before anything is trained."""
        if self.teacher in ("full", "ema"):
            return
        device = next(self.model.parameters()).device
        forked = [device] if device.type == "cuda" else []
        with (
            torch.random.fork_rng(forked),
            buffers_kept(self.model),
            torch.no_grad(),
            self.objective.precision(inputs),
            at_width(self.model, plan_of(self.model).widest),
        ):
            theirs = _shapes(self.outputs(inputs))
            ours = _shapes(call(self.model, inputs))
        if theirs != ours:
            raise AnywidthError(
                f"the teacher's output has shape {theirs}, and the network's {ours}: expected the "
                "same. Adapt it in a function, such as teacher=lambda images: large(images)[:, :10]"
            )


def _shapes(output: Any) -> str:
    parts = (tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in leaves(output))
    return " and ".join(map(str, parts)) or "none"
