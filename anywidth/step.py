"""One training step over all sampled widths: algorithm 1 of the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.convert import at_width
from anywidth.distillation import soft_cross_entropy
from anywidth.distributed import average_gradients, sum_over_ranks, world_size
from anywidth.engine.eager import EagerEngine
from anywidth.engine.graphs import GraphEngine
from anywidth.engine.passes import Distill, Loss, Objective
from anywidth.engine.trees import call
from anywidth.errors import AnywidthError
from anywidth.fast_layers import use_kernels
from anywidth.precision import faster_dtype
from anywidth.sampling import Sampling, sample_widths
from anywidth.state import check_layers, state_of
from anywidth.width import ChannelConfig, Width


@dataclass(frozen=True)
class StepResult:
    """What one step did, on the device: nothing here was read back yet.

    It holds until the next step, which may use the same memory.

    Args:
        widths: the configurations visited, the widest first where it is one of them.
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

    Gradients are summed over the widths, as in the paper. A layer that every width uses whole, such
    as a classifier over features that do not narrow, so learns as if at several times the learning
    rate: where training starts unstably, lower the rate, or raise it more slowly.

    A call returns a `StepResult`: the configurations visited (`widths`, the widest first where it
    is one of them) with the loss and the detached output at each. They are tensors on the device,
    and hold until the next call.

    Args:
        model: a converted network, in training mode.
        optimizer: of the model's parameters.
        loss: (output, targets) → scalar, for the full width.
        distill: (output, full width's output) → scalar, for narrower widths. The default is for
            classifiers that learn by cross entropy; for others pass one of their own, such as
            F.mse_loss for regression. None trains every width on the true targets.
        widths: how many widths a step, for the sandwich rule; or a `Sampling` for any other.
        truth: how much of the narrower widths' loss is the true targets' (0 in the paper, which
            found mixing worse).
        seed: widths are drawn from this and the step's number; a `Sampling` has its own.
        autocast: run forward passes in this dtype, as `torch.autocast` does; None in that of the
            parameters. `"auto"` is bfloat16 on a GPU, and on a CPU where the first step finds it
            faster.
        engine: `"eager"` runs everywhere; `"graphs"` captures each configuration as a CUDA graph
            when it is first met; `"auto"` takes graphs on a GPU. A graph keeps the plain numbers
            it was captured with: what a loss weighs by, or a dropout's share, may only change in a
            tensor.
        kernels: on a GPU, let layers use kernels that need no preparing for a new width; False
            leaves them as they are.
        after_backward: called once the gradients are complete, before the optimiser's step: to
            clip them, say.

    Example:
        >>> step = anywidth.SandwichStep(model, optimizer, loss=F.cross_entropy)
        >>> for images, labels in loader:
        ...     result = step(images, labels)
        >>> result.losses[0].item()  # of the full width; this waits for the device
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        distill: Distill | None = soft_cross_entropy,
        widths: int | Sampling = 4,
        *,
        truth: float = 0.0,
        seed: int = 0,
        autocast: torch.dtype | Literal["auto"] | None = "auto",
        engine: Literal["auto", "eager", "graphs"] = "auto",
        kernels: bool = True,
        after_backward: Callable[[], None] | None = None,
    ) -> None:
        check_layers(model)
        if isinstance(widths, int):
            widths = Sampling(count=widths, seed=seed)
        if not isinstance(widths, Sampling):
            raise AnywidthError(
                f"widths={widths!r}: expected how many a step, or a Sampling; for always the same "
                'ones, Sampling("fixed", widths=(0.25, 0.5, 1.0))'
            )
        if not 0 <= truth <= 1:
            raise AnywidthError(f"truth={truth}: expected a share from 0 to 1")
        if distill is soft_cross_entropy and _is_not_cross_entropy(loss):
            raise AnywidthError(
                f"the loss is {_name(loss)}, but narrower widths would learn by cross entropy with "
                "the full width's logits: pass distill=..., a function of (output, full width's "
                "output) such as F.mse_loss, or distill=None to train all on the targets"
            )
        if distill is not None and widths.rule in ("random", "min+random"):
            raise AnywidthError(
                f"the rule {widths.rule!r} leaves out the widest width, so there is nothing "
                "to distill from: pass distill=None"
            )
        self.model = model
        self.optimizer = optimizer
        self.sampling = widths
        self.after_backward = after_backward
        self.count = 0
        on_gpu = all(parameter.is_cuda for parameter in model.parameters())
        if on_gpu:
            _lay_channels_last(model)
            use_kernels(model, kernels)
        self.autocast = autocast
        self._precision_is_auto = autocast == "auto"
        objective = Objective(loss, distill, truth, None if autocast == "auto" else autocast)
        if _uses_graphs(engine, on_gpu):
            self.engine: EagerEngine | GraphEngine = GraphEngine(model, optimizer, objective)
        else:
            self.engine = EagerEngine(model, optimizer, objective)

    def __call__(self, inputs: Any, targets: Any) -> StepResult:
        """One step; `self.count` is its number, from which its widths are drawn.

        A tuple of inputs is the network's positional arguments, as for `anywidth.plan`.
        """
        configs = sample_widths(self.model, self.count, self.sampling)
        if not self.model.training:
            self.model.train()
        if self.autocast == "auto":
            self._run_in(self._faster_dtype(configs[0], inputs, targets))
        with torch.cuda.device_of(next(self.model.parameters())):
            losses, outputs = self.engine.gradients(configs, inputs, targets)
        average_gradients(self.model.parameters())
        if self.after_backward is not None:
            self.after_backward()
        self.optimizer.step()
        self.count += 1
        return StepResult(configs, losses, outputs)

    def warm_up(self, widths: Sequence[Width], inputs: Any, targets: Any) -> None:
        """Captures widths ahead of training, the widest first; nothing to do for the eager engine.

        Weights and running statistics stay as they are.
        """
        if isinstance(self.engine, GraphEngine):
            self.model.train()
            configs = [state_of(self.model).resolve(width) for width in widths]
            if self.autocast == "auto":
                self._run_in(self._faster_dtype(configs[0], inputs, targets))
            with torch.cuda.device_of(next(self.model.parameters())):
                self.engine.warm_up(configs, inputs, targets)

    @property
    def precision(self) -> str:
        """`"auto"` until the first step has chosen, then a dtype's name or `"parameters"`."""
        if isinstance(self.autocast, torch.dtype):
            return str(self.autocast).removeprefix("torch.")
        return self.autocast or "parameters"

    @precision.setter
    def precision(self, name: str) -> None:
        """Settles what `autocast="auto"` stands for: a resumed run must not choose again."""
        if self._precision_is_auto and name not in ("auto", self.precision):
            self._run_in(None if name == "parameters" else getattr(torch, name))

    def _run_in(self, dtype: torch.dtype | None) -> None:
        self.autocast = dtype
        self.engine.run(replace(self.engine.objective, autocast=dtype))

    def _faster_dtype(self, config: ChannelConfig, inputs: Any, targets: Any) -> torch.dtype | None:
        objective = self.engine.objective
        with at_width(self.model, config):
            found = faster_dtype(
                self.model, lambda: objective.loss(call(self.model, inputs), targets)
            )
        if world_size() > 1 and _is_on_cpu(self.model):
            # Timings differ from rank to rank, and all must run in the same dtype.
            votes = sum_over_ranks(torch.tensor(float(found is not None)))
            found = found if votes.item() == world_size() else None
        return found


# What networks learn by whose outputs are no logits of classes of which one is right.
_OTHER_LOSSES = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
)
_OTHER_LOSS_MODULES = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss),
)


def _is_not_cross_entropy(loss: Loss) -> bool:
    return loss in _OTHER_LOSSES or isinstance(loss, _OTHER_LOSS_MODULES)


def _name(loss: Loss) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _lay_channels_last(model: nn.Module) -> None:
    """What convolutions of images are fastest in; the parameters stay the same objects."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _is_on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def _uses_graphs(engine: str, on_gpu: bool) -> bool:
    if engine not in ("auto", "eager", "graphs"):
        raise AnywidthError(f"engine {engine!r}: expected 'auto', 'eager' or 'graphs'")
    if engine == "graphs" and not on_gpu:
        raise AnywidthError("the engine 'graphs' needs the model on a CUDA GPU: model.cuda() first")
    return engine != "eager" and on_gpu
