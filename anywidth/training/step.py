"""One training step over all sampled widths: algorithm 1 of the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anywidth.distributed import Group, average, is_sharded, members, send_from_first_rank
from anywidth.errors import AnywidthError
from anywidth.planning.groups import Plan
from anywidth.slimming.norm_statistics import running_statistics
from anywidth.slimming.state import check_layers, state_of
from anywidth.training.distillation import Distill
from anywidth.training.engine.eager import EagerEngine
from anywidth.training.engine.graphs import GraphEngine
from anywidth.training.engine.passes import Loss, Objective, trained_parameters
from anywidth.training.gpu.fast_layers import use_kernels
from anywidth.training.precision import dtype_by_device
from anywidth.training.sampling import Sampling, sample_widths
from anywidth.training.spent_gradients import check_spent, mark_fresh, mark_spent, watch
from anywidth.training.step_checks import (
    check_first_batch,
    check_optimizers,
    check_own_steps,
    distillation_for,
    frozen_norms_named,
)
from anywidth.training.width_weights import WidthWeights, check_weights, width_weights
from anywidth.width import ChannelConfig, Width, is_number, whole_number


@dataclass(frozen=True)
class StepResult:
    """What one step did, on the device: nothing here was read back yet.

    It holds until the next step, which may use the same memory.

    Args:
        widths: the configurations visited, the widest first where it is one of them.
        losses: the loss at each of them, not weighed or scaled.
        outputs: the network's output at each of them, without gradients.
        plan: of the network.
    """

    widths: list[ChannelConfig]
    losses: list[Tensor]
    outputs: list[Any]
    plan: Plan = field(repr=False)

    @property
    def fractions(self) -> list[float]:
        """The share of the channels at each width, to name it in a log: 1.0, 0.25, ..."""
        return [self.plan.fraction(config) for config in self.widths]


class SandwichStep:
    """Trains a converted network at several widths on one batch.

    A call clears the gradients, runs the full width on the true targets, runs each narrower width
    on the full width's detached predictions, accumulates all their gradients, averages them over
    ranks once, and lets the optimiser take its step. It never waits for the device. With several
    processes, pass the network itself, not in DistributedDataParallel: the first call gives all
    ranks the weights of the first. FSDP2 (`fully_shard`) reduces its own gradients, once per width
    and by the eager engine. Running statistics are averaged with the gradients.

    Gradients are summed over the widths, as in the paper. A layer that every width uses whole, such
    as a classifier over features that do not narrow, so learns as if at several times the learning
    rate: where training starts unstably, lower the rate, or raise it more slowly.

    A call returns a `StepResult`: the configurations visited (`widths`, the widest first where it
    is one of them) with the loss and the detached output at each. They are tensors on the device,
    and hold until the next call.

    Where something else takes the optimiser's step (accumulated gradients, a `GradScaler`,
    accelerate, Lightning, Hugging Face's Trainer), call `step.backward(inputs, targets)` instead:
    it adds the gradients of all widths to those in the parameters, and does nothing else.

    To resume, put back the network (`anywidth.save`), the optimiser, and the step
    (`load_state_dict`): the widths of a step are drawn from its number.

    Args:
        model: a converted network; a call puts it in training mode if it is not.
        optimizer: of the model's parameters, or some of them; a loss may have its own there too.
            A list of several takes a step of each; None leaves `backward` alone.
        loss: (output, targets) → scalar, for the full width.
        distill: (output, full width's output) → scalar, for narrower widths, such as F.mse_loss
            for regression. `"auto"` is `soft_cross_entropy` if the loss is known to be a cross
            entropy over classes; any other loss needs a distillation of its own. None trains
            every width on the true targets.
        widths: how many widths a step, for the sandwich rule; or a `Sampling` for any other.
        truth: how much of the narrower widths' loss is the true targets' (0 in the paper, which
            found mixing worse).
        weights: how much each width's loss counts. `"paper"` sums them; `"balanced"` gives the
            narrower widths together as much weight as the widest has alone; or one number per
            width, the widest first; or a function of (configuration, position, number of widths).
        seed: widths are drawn from this and the step's number; a `Sampling` has its own.
        autocast: run forward passes in this dtype, as `torch.autocast` does; None in that of the
            parameters. `"auto"` is bfloat16 on a GPU and None on a CPU. float16 needs a
            `GradScaler`: see `backward`.
        engine: `"eager"` runs everywhere; `"graphs"` captures each configuration as a CUDA graph
            when it is first met; `"auto"` takes graphs on a GPU. A graph keeps the plain numbers
            it was captured with: what a loss weighs by, or a dropout's share, may only change in a
            tensor.
        kernels: on a GPU, let layers use kernels that need no preparing for a new width; False
            leaves them as they are.
        after_backward: called once the gradients are complete, before the optimiser's step: to
            clip them, say.
        process_group: processes that train this network together, each on its part of a batch.
            `"world"` is all of them, if torch.distributed is initialised; None trains alone.

    Example:
        >>> step = anywidth.SandwichStep(model, optimizer, loss=F.cross_entropy)
        >>> for images, labels in loader:
        ...     result = step(images, labels)
        >>> result.losses[0].item()  # of the full width; this waits for the device
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        loss: Loss,
        distill: Distill | Literal["auto"] | None = "auto",
        widths: int | Sampling = 4,
        *,
        truth: float = 0.0,
        weights: WidthWeights = "paper",
        seed: int = 0,
        autocast: torch.dtype | Literal["auto"] | None = None,
        engine: Literal["auto", "eager", "graphs"] = "auto",
        kernels: bool = True,
        after_backward: Callable[[], None] | None = None,
        process_group: Group = "world",
    ) -> None:
        check_layers(model)
        several: Any = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        optimizers = [one for one in several if one is not None]
        check_optimizers(model, optimizers)
        distillation = distillation_for(loss, distill)
        count = whole_number(widths)
        if count is not None:
            widths = Sampling(count=count, seed=seed)
        if not isinstance(widths, Sampling):
            raise AnywidthError(
                f"widths={widths!r}: expected how many a step, or a Sampling; for always the same "
                'ones, Sampling("fixed", widths=(0.25, 0.5, 1.0))'
            )
        if count is None and seed not in (0, widths.seed):
            raise AnywidthError(
                f"seed={seed!r} beside a Sampling, which has its own ({widths.seed}): pass "
                f"Sampling(..., seed={seed!r})"
            )
        if not is_number(truth) or not 0 <= truth <= 1:
            raise AnywidthError(f"truth={truth!r}: expected a share from 0 to 1")
        check_weights(weights)
        if not (autocast is None or autocast == "auto" or isinstance(autocast, torch.dtype)):
            raise AnywidthError(
                f"autocast={autocast!r}: expected a dtype such as torch.bfloat16, 'auto' or None"
            )
        if distillation is not None and widths.rule in ("random", "min+random"):
            raise AnywidthError(
                f"the rule {widths.rule!r} leaves out the widest width, so there is nothing "
                "to distill from: pass distill=None"
            )
        self.model = model
        self.optimizer: Any = optimizer
        self.optimizers = optimizers
        self.sampling = widths
        self.weights = weights
        self.after_backward = after_backward
        self.process_group = process_group
        self.count = 0
        self._is_new = True
        self._visited: set[ChannelConfig] = set()
        self.parameters = trained_parameters(model, optimizers)
        watch(optimizers)
        # What FSDP shards has no memory of its own for graphs and kernels to use.
        on_gpu = all(p.is_cuda and not is_sharded(p) for p in model.parameters())
        if on_gpu:
            _lay_channels_last(model)
            use_kernels(model, kernels)
        self.autocast = dtype_by_device(model) if autocast == "auto" else autocast
        objective = Objective(loss, distillation, truth, self.autocast)
        if _uses_graphs(engine, on_gpu):
            self.engine: EagerEngine | GraphEngine = GraphEngine(model, self.parameters, objective)
        else:
            self.engine = EagerEngine(model, objective)

    def __call__(self, inputs: Any, targets: Any = None) -> StepResult:
        """One step: `backward` from gradients of zero, then the optimiser's step.

        A tuple of inputs is the network's positional arguments, as for `anywidth.plan`; a dict is
        its keyword arguments, or its one argument if that is what the network takes.
        """
        check_own_steps(self.optimizers)
        if not self._is_new:
            check_spent(self.parameters)
        for parameter in self.parameters:  # also those that the optimiser does not hold
            parameter.grad = None
        result = self._add_gradients(inputs, targets, 1.0)
        self.reduce()
        if self.after_backward is not None:
            self.after_backward()
        for optimizer in self.optimizers:
            optimizer.step()
        mark_spent(self.parameters, by_step=True)
        self.count += 1
        return result

    def backward(self, inputs: Any, targets: Any = None, scale: float | Tensor = 1.0) -> StepResult:
        """Adds the gradients of all widths to those in the parameters, and counts the step.

        Nothing is cleared, reduced over ranks or stepped. Every call draws widths of its own, from
        `count`; all ranks draw the same.

        Args:
            inputs: as for a call.
            targets: likewise.
            scale: of the gradients; the losses in the result are not scaled.

        Example:
            >>> for number, (images, labels) in enumerate(loader, start=1):
            ...     step.backward(images, labels, scale=1 / 4)
            ...     if number % 4 == 0:
            ...         step.reduce()  # of several processes
            ...         optimizer.step()
            ...         optimizer.zero_grad()

            With float16 and a `GradScaler`:

            >>> one = torch.ones((), device=images.device)
            >>> step.backward(images, labels, scale=scaler.scale(one))
            >>> scaler.step(optimizer)
            >>> scaler.update()
        """
        result = self._add_gradients(inputs, targets, scale)
        self.count += 1
        return result

    def _add_gradients(self, inputs: Any, targets: Any, scale: float | Tensor) -> StepResult:
        configs = sample_widths(self.model, self.count, self.sampling)
        weights = [weight * scale for weight in width_weights(self.weights, configs)]
        if not self.model.training:
            self.model.train()
        if self._is_new:
            send_from_first_rank(self.model, self.parameters, self.process_group)
        with (
            torch.cuda.device_of(next(self.model.parameters())),
            frozen_norms_named(self.model),
        ):
            losses, outputs = self.engine.add_gradients(configs, weights, inputs, targets)
        mark_fresh(self.parameters)
        if self._is_new and len(outputs) > 1:
            check_first_batch(self.engine.objective.distill, outputs[0], targets)
        self._is_new = False
        self._visited.update(configs)
        return StepResult(configs, losses, outputs, state_of(self.model).plan)

    def reduce(self) -> None:
        """Averages gradients, and the statistics of the widths visited since, over all ranks.

        All ranks visit the same widths, so a parameter has a gradient on all of them or on none.
        """
        if members(self.process_group) is not None:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            statistics = running_statistics(self.model, self._visited)
            average([*gradients, *statistics], self.process_group)
        self._visited.clear()

    def state_dict(self) -> dict[str, int]:
        """What a resumed training needs of a step: how many there were."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from what `state_dict` returned."""
        count = whole_number(state.get("count")) if isinstance(state, Mapping) else None
        if count is None or count < 0:
            raise AnywidthError(
                f"load_state_dict({state!r}): expected what SandwichStep.state_dict() returned, "
                'such as {"count": 1000}'
            )
        self.count = count

    def warm_up(self, widths: Sequence[Width], inputs: Any, targets: Any) -> None:
        """Captures widths ahead of training, the widest first; nothing to do for the eager engine.

        Weights and running statistics stay as they are.
        """
        if isinstance(self.engine, GraphEngine):
            self.model.train()
            configs = [state_of(self.model).resolve(width) for width in widths]
            with torch.cuda.device_of(next(self.model.parameters())):
                self.engine.warm_up(configs, inputs, targets)


def _lay_channels_last(model: nn.Module) -> None:
    """What convolutions of images are fastest in; the parameters stay the same objects."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _uses_graphs(engine: str, on_gpu: bool) -> bool:
    if engine not in ("auto", "eager", "graphs"):
        raise AnywidthError(f"engine {engine!r}: expected 'auto', 'eager' or 'graphs'")
    if engine == "graphs" and not on_gpu:
        raise AnywidthError(
            "the engine 'graphs' needs the model on a CUDA GPU (model.cuda() first), not sharded"
        )
    return engine != "eager" and on_gpu
