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
from anywidth.planning.modes import TrainingModes
from anywidth.slimming.converted_part import network_in
from anywidth.slimming.norm_statistics import running_statistics
from anywidth.slimming.state import check_layers, state_of
from anywidth.training import optimizer_hooks as hooks
from anywidth.training import step_checks as checks
from anywidth.training.distillation import Distill
from anywidth.training.engine.eager import EagerEngine
from anywidth.training.engine.graphs import GraphEngine
from anywidth.training.engine.passes import Loss, Objective, trained_parameters
from anywidth.training.gpu.fast_layers import use_kernels
from anywidth.training.precision import dtype_by_device
from anywidth.training.sampling import (
    Sampling,
    WidthWeights,
    checked_weights,
    sample_widths,
    width_weights,
)
from anywidth.training.teachers import Teacher, Teaching
from anywidth.training.token_loss import TokenLoss
from anywidth.training.weight_average import WeightAverage, update_after
from anywidth.width import ChannelConfig, Width, whole_number


@dataclass(frozen=True)
class StepResult:
    """The losses and outputs of one step, as tensors on the device.

    It is valid until the next step, which may use the same memory.

    Args:
        widths: the configurations of the step; if the widest is among them, it is first.
        losses: the loss of each configuration, without weight or scale.
        outputs: the network's output for each configuration, without gradients.
        plan: the plan of the network.
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
    on the full width's detached predictions (or another teacher's), adds the gradients, averages
    them over ranks once, and calls the optimizer. It never waits for the device. With several
    processes, pass the network itself, not wrapped in DistributedDataParallel: the first call gives
    all ranks the weights of the first rank. FSDP2 (`fully_shard`) reduces its own gradients, once
    per width, and uses the eager engine. Running statistics are averaged together with the
    gradients.

    The narrower widths together weigh as much as the full one, so that layers which every width
    uses whole do not learn mostly from the narrow ones. `weights="paper"` is the paper's plain sum.

    If something else calls the optimizer (accumulated gradients, a `GradScaler`, accelerate,
    Lightning, Hugging Face's Trainer), use `step.backward(inputs, targets)` instead: it adds the
    gradients of all widths to the parameters' gradients, and does nothing else.

    To resume, restore the network (`anywidth.load`), the optimizer, and the step
    (`load_state_dict`), because the widths of a step are drawn from its number.

    Args:
        model: a converted network, or a model with one in it, such as a detector; a call puts it in
            training mode if all of it is in evaluation mode; modules that were frozen by `eval()`
            while the model was in training mode stay so.
        optimizer: for the model's parameters, or some of them; it may also hold a loss's own. With
            a list, each takes a step; with None only `backward` can be used. If no width trains
            some channels (a range that ends below 1.0), they keep their values: weight decay does
            not reach them. With None nothing watches over that.
        loss: (output, targets) → scalar, for the full width.
        distill: (output, full width's output) → scalar, for narrower widths, such as F.mse_loss
            for regression. It gets the targets and the `ChannelConfig` of its width too, if it has
            arguments of these names: def distill(output, full, *, targets, config). `"auto"` is
            `soft_cross_entropy` if the loss is known to be a cross entropy over classes, or a
            `TokenLoss`; for any other loss, pass a distillation. None trains every width on the
            true targets.
        widths: number of widths per step, by the sandwich rule; or a `Sampling` for other rules.
        truth: share of the true targets in the loss of narrower widths (0 in the paper, which
            found mixing worse).
        weights: weights of the losses of the widths. `"balanced"` gives all narrower widths
            together the weight of the widest; `"paper"` sums the losses, and is the default of
            rules that may leave out the widest; or one number per width, the widest first; or a
            function of (configuration, position, number of widths).
        teacher: the output that narrower widths learn from: `"full"` is the full width's in this
            step, `"ema"` that of the averaged weights, which costs one more forward pass; or
            another network, or a function of the network's inputs. Its outputs must have the
            shape of the network's.
        ema_decay: keep an average of the weights with this decay, such as 0.997, as `step.ema`: a
            `WeightAverage`, to be kept at the end.
        seed: widths are drawn from this and the step's number; a `Sampling` has its own seed.
        autocast: run forward passes in this dtype, as `torch.autocast` does; None keeps the
            parameters' dtype. `"auto"` is bfloat16 on a GPU and None on a CPU. float16 needs a
            `GradScaler`: see `backward`.
        engine: `"eager"` runs everywhere; `"graphs"` captures each configuration as a CUDA graph
            the first time it is drawn; `"auto"` uses graphs on a GPU. A graph keeps the Python
            numbers it was captured with: a loss weight or a dropout rate that changes must be a
            tensor.
        kernels: on a GPU, use kernels that need no preparation for a new width; False keeps
            PyTorch's layers.
        after_backward: called when the gradients are complete, before the optimizer's step, for
            example to clip them.
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
        weights: WidthWeights | None = None,
        teacher: Teacher = "full",
        ema_decay: float | None = None,
        seed: int = 0,
        autocast: torch.dtype | Literal["auto"] | None = None,
        engine: Literal["auto", "eager", "graphs"] = "auto",
        kernels: bool = True,
        after_backward: Callable[[], object] | None = None,
        process_group: Group = "world",
    ) -> None:
        network = network_in(model)
        check_layers(network)
        several: Any = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        optimizers = [one for one in several if one is not None]
        checks.check_optimizers(model, optimizers)
        distillation = checks.distillation_for(loss, distill)
        count = whole_number(widths)
        if count is not None:
            widths = Sampling(count=count, seed=seed)
        if not isinstance(widths, Sampling):
            raise AnywidthError(
                f"widths={widths!r}: expected the number of widths per step, or a Sampling; for "
                'fixed widths use Sampling("fixed", widths=(0.25, 0.5, 1.0))'
            )
        if count is None and seed not in (0, widths.seed):
            raise AnywidthError(
                f"seed={seed!r}: the Sampling has its own seed ({widths.seed}); pass "
                f"Sampling(..., seed={seed!r})"
            )
        checks.check_share(truth)
        weights = checked_weights(weights, widths)
        if autocast != "auto" and not isinstance(autocast, torch.dtype | None):
            raise AnywidthError(
                f"autocast={autocast!r}: expected a dtype such as torch.bfloat16, 'auto' or None"
            )
        if distillation is not None and widths.may_leave_out_widest:
            raise AnywidthError(
                f"the rule {widths.rule!r} may leave out the widest width, which distillation "
                "needs: pass distill=None"
            )
        self.model = model
        self.network = network
        self._optimizer: Any = optimizer
        self.optimizers = optimizers
        self.sampling = widths
        self.weights = weights
        self.after_backward = after_backward
        self.process_group = process_group
        self.count = 0
        self._is_new = True
        self._visited: set[ChannelConfig] = set()
        self.parameters = trained_parameters(model, optimizers)
        self._modes = TrainingModes(model)
        # What FSDP shards has no memory of its own for graphs and kernels to use.
        on_gpu = all(p.is_cuda and not is_sharded(p) for p in model.parameters())
        if on_gpu:
            for parameter in model.parameters():  # this memory format is the fastest for images
                if parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
            use_kernels(network, kernels)
        self.autocast = dtype_by_device(model) if autocast == "auto" else autocast
        objective = Objective(loss, distillation, truth, self.autocast)
        self.ema = None if ema_decay is None else WeightAverage(model, ema_decay)
        self.teaching = Teaching(teacher, model, self.ema, objective)
        self._follow_optimizers()
        if _uses_graphs(engine, on_gpu):
            self.engine: EagerEngine | GraphEngine = GraphEngine(model, self.parameters, objective)
        else:
            self.engine = EagerEngine(model, objective)

    @property
    def optimizer(self) -> Any:
        """The optimizer, or several, as they were given."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, other: Any) -> None:
        raise AnywidthError(
            f"step.optimizer = {type(other).__name__}: a step keeps its optimizer. Make a new "
            "SandwichStep with the other one, and continue with its "
            "load_state_dict(step.state_dict())"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of a step: torch copies optimizers without the hooks that follow their steps."""
        self.__dict__.update(state)
        if not all(map(hooks.is_watched, self.optimizers)):
            self._follow_optimizers()

    def _follow_optimizers(self) -> None:
        plan = state_of(self.network).plan
        hooks.watch(self.optimizers)
        hooks.leave_untrained_channels(self.network, plan, self.sampling, self.optimizers)
        if self.ema is not None:
            update_after(self.optimizers, self.ema)

    def __call__(self, inputs: Any, targets: Any = None) -> StepResult:
        """Run one step: `backward` from zero gradients, then the optimizer's step.

        A tuple of inputs is the network's positional arguments, as in `anywidth.plan`; a dict is
        its keyword arguments, or its one argument if the network takes a dict.
        """
        checks.check_own_steps(self.optimizers)
        if not self._is_new:
            hooks.check_spent(self.parameters)
        for parameter in self.parameters:  # also those that the optimizer does not hold
            parameter.grad = None
        result = self._add_gradients(inputs, targets, 1.0)
        self.reduce()
        if self.after_backward is not None:
            self.after_backward()
        for optimizer in self.optimizers:
            optimizer.step()
        hooks.mark_spent(self.parameters, by_step=True)
        self.count += 1
        return result

    def backward(self, inputs: Any, targets: Any = None, scale: float | Tensor = 1.0) -> StepResult:
        """Add the gradients of all widths to the parameters' gradients, and count the step.

        It does not clear gradients, reduce them over ranks or call the optimizer. Every call draws
        its own widths from `count`; all ranks draw the same. `scale` scales the gradients, but not
        the losses in the result.

        Example:
            >>> for number, (images, labels) in enumerate(loader, start=1):
            ...     step.backward(images, labels, scale=1 / 4)
            ...     if number % 4 == 0:
            ...         step.reduce()  # with several processes
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
        configs = sample_widths(self.network, self.count, self.sampling)
        weights = [weight * scale for weight in width_weights(self.weights, configs)]
        self._modes.restore()
        if self._is_new:
            if isinstance(self.engine.objective.loss, TokenLoss):
                self.engine.objective.loss.check_shift(inputs, targets)
            send_from_first_rank(self.model, self.parameters, self.process_group)
        if self._is_new and self.ema is not None and self.ema.updates == 0:
            self.ema.restart()  # weights may have been loaded since the step was made
        with (
            torch.cuda.device_of(next(self.model.parameters())),
            checks.frozen_norms_named(self.model),
            checks.inputs_kept(inputs),
        ):
            if self._is_new:
                self.teaching.check(inputs)
            taught = self.teaching.outputs(inputs)
            losses, outputs = self.engine.add_gradients(configs, weights, inputs, targets, taught)
        hooks.mark_fresh(self.parameters)
        if self._is_new and len(outputs) > 1:
            checks.check_first_batch(self.engine.objective.distill, outputs[0], targets)
        self._is_new = False
        self._visited.update(configs)
        return StepResult(configs, losses, outputs, state_of(self.network).plan)

    def reduce(self) -> None:
        """Average gradients, and statistics of the widths since the last call, over all ranks.

        All ranks visit the same widths, so a parameter has a gradient on all of them or on none.
        """
        if members(self.process_group) is not None:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            statistics = running_statistics(self.model, self._visited)
            average([*gradients, *statistics], self.process_group)
        self._visited.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state for resuming: the number of steps so far, and the average of the weights."""
        return {"count": self.count, **({"ema": self.ema.state_dict()} if self.ema else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; load the network's weights first."""
        count = whole_number(state.get("count")) if isinstance(state, Mapping) else None
        if count is None or count < 0:
            raise AnywidthError(
                f"load_state_dict({state!r}): expected a result of SandwichStep.state_dict(), such "
                'as {"count": 1000}'
            )
        if ("ema" in state) != (self.ema is not None):
            has, needs = ("an", "with") if "ema" in state else ("no", "without")
            raise AnywidthError(
                f"load_state_dict(): the state has {has} average of the weights: make the step "
                f"{needs} ema_decay"
            )
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.count = count

    def warm_up(self, widths: Sequence[Width], inputs: Any, targets: Any) -> None:
        """Capture widths before training, the widest first; the eager engine does nothing.

        Weights and running statistics do not change.
        """
        if isinstance(self.engine, GraphEngine):
            self._modes.restore()
            configs = [state_of(self.network).resolve(width) for width in widths]
            device = torch.cuda.device_of(next(self.model.parameters()))
            with device, hooks.marks_kept(self.parameters):
                taught = self.teaching.outputs(inputs)
                self.engine.warm_up(configs, inputs, targets, taught)


def _uses_graphs(engine: str, on_gpu: bool) -> bool:
    if engine not in ("auto", "eager", "graphs"):
        raise AnywidthError(f"engine {engine!r}: expected 'auto', 'eager' or 'graphs'")
    if engine == "graphs" and not on_gpu:
        raise AnywidthError(
            "the engine 'graphs' needs the model on a CUDA GPU, not sharded: call model.cuda()"
        )
    return engine != "eager" and on_gpu
