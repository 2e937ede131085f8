"""The fast engine on a GPU: one CUDA graph per configuration, replayed without Python.

A graph contains the forward pass, loss and backward pass of one configuration, and adds its
gradients to buffers that all graphs share. All graphs use one memory pool. This is safe because
they run one after the other, and because losses, outputs and gradients are copied out of the pool.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.slimming.convert import at_width
from anywidth.slimming.norm_statistics import buffers_kept
from anywidth.training.engine.capture import CaptureError, CudaCapture
from anywidth.training.engine.eager import EagerEngine
from anywidth.training.engine.passes import Objective, detached
from anywidth.training.engine.places import AssignedBufferError, Places, assigning_no_buffers
from anywidth.training.engine.replayed_statistics import ReplayedStatistics
from anywidth.training.engine.trees import copy_into, leaves, map_tensors, signature
from anywidth.training.gpu.fast_layers import weights_read_cast
from anywidth.training.gpu.kernels.shared_buffers import gradients_added_to, weights_cast_to
from anywidth.width import ChannelConfig

# (configuration, whether it learns from a teacher)
Key = tuple[ChannelConfig, bool]


@dataclass
class CapturedPass:
    """A pass, with the buffers for its results.

    Args:
        loss: the loss.
        output: the network's output.
        used: the sums to which it added gradients.
        statistics: the running statistics that it reads and writes.
        replay: runs it again, if it was captured.
    """

    loss: Tensor
    output: Any
    used: list[Tensor]
    statistics: ReplayedStatistics
    replay: Callable[[], None] | None = None


class GraphEngine:
    """Computes the gradients of a step by replaying graphs.

    A configuration is captured the first time it is used.

    Args:
        model: a converted network on a GPU.
        parameters: the parameters to train: the network's, and those of a loss.
        objective: the loss and the distillation of the widths.
        most_graphs: beyond this number, the least recently used graph is dropped.
        capture: how passes are captured.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        objective: Objective,
        most_graphs: int = 512,
        capture: CudaCapture | None = None,
    ) -> None:
        self.model = model
        self.objective = objective
        self.most_graphs = most_graphs
        self.capture = capture or CudaCapture()
        self.fallback = EagerEngine(model, objective)
        self.captured: OrderedDict[Key, CapturedPass] = OrderedDict()
        self.can_capture = True
        self.batch: tuple[Any, Any] | None = None
        self.stray: list[Any] | None = None  # the last batch's signature, if it was unlike others
        self.all_parameters = list(parameters)
        self.places = Places(model, parameters)
        self.parameters: list[nn.Parameter] = []
        self.sums: list[Tensor] = []
        self.weight = torch.ones(())  # of the width whose gradients are computed
        self.read_cast: list[Tensor] = []
        self.casts: list[Tensor] = []
        self.teacher: Any = None

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
        The results are in the engine's buffers and are valid until the next step.
        """
        if not self.can_capture or not self._take(inputs, targets):
            return self.fallback.add_gradients(configs, weights, inputs, targets, teacher)
        pairs = list(zip(self.parameters, self.sums, strict=True))
        new = [total for parameter, total in pairs if parameter.grad is not total]
        if new:
            torch._foreach_zero_(new)
        losses: list[Tensor] = []
        outputs: list[Any] = []
        used: set[int] = set()
        for index, config in enumerate(configs):
            key = (config, index > 0 and self.objective.distill is not None)
            weight = weights[index]
            if isinstance(weight, Tensor):
                self.weight.copy_(weight)
            else:
                self.weight.fill_(weight)
            done = self._replay(key) or self._first_sight(key)
            used |= {id(total) for total in done.used}
            if index == 0:
                self._learn_from(done.output if teacher is None else teacher)
            losses.append(done.loss)
            outputs.append(done.output)
        for parameter, total in pairs:
            # Weight decay acts on a gradient of zero, but not on a parameter that takes no part.
            if parameter.grad is None:
                parameter.grad = total if id(total) in used else None
            elif parameter.grad is not total:  # from the user's own backward pass
                parameter.grad.add_(total)
        return losses, outputs

    def warm_up(
        self, configs: Sequence[ChannelConfig], inputs: Any, targets: Any, teacher: Any = None
    ) -> None:
        """Capture configurations before training.

        The network's weights and running statistics do not change.
        """
        self.stray = signature((inputs, targets))  # later batches have this form
        if not self.can_capture or not self._take(inputs, targets):
            return
        with buffers_kept(self.model), self._gradients_kept():
            for index, config in enumerate(configs):
                key = (config, index > 0 and self.objective.distill is not None)
                if key not in self.captured:
                    done = self._first_sight(key)
                    if not self.can_capture:
                        return
                    if index == 0:
                        self._learn_from(done.output if teacher is None else teacher)

    def forget(self) -> None:
        """Drop all graphs and their memory."""
        self.captured.clear()
        self.capture.start_anew()
        self.teacher = None

    # ---- the beginning of a step -----------------------------------------------------------------

    def _take(self, inputs: Any, targets: Any) -> bool:
        """Copy a batch into the static buffers; false if this step cannot use graphs."""
        batch = (inputs, targets)
        # A number on the CPU works beside tensors on a GPU, but a graph would keep its first value.
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
        if not tensors or not self.capture.reaches(tensors):
            return False
        if self.places.have_hooks():
            self._give_up("its parameters have hooks, which replays would not run")
            return False
        if self.places.have_changed() or self.batch is None:
            self._start_anew(batch)
        elif signature(self.batch) != signature(batch):
            if self.captured and self.stray != signature(batch):
                # It may be the last batch of an epoch, for which all graphs should not be dropped.
                self.stray = signature(batch)
                return False
            self._start_anew(batch)
        self.stray = None
        copy_into(self.batch, batch)
        if self.casts:
            with torch.no_grad():
                torch._foreach_copy_(self.casts, self.read_cast)
        return True

    def _start_anew(self, batch: tuple[Any, Any]) -> None:
        """Make buffers for batches of this form, and for the parameters as they are now."""
        self.forget()
        self.parameters = [p for p in self.all_parameters if p.requires_grad]
        self.batch = map_tensors(_buffer_like, batch)
        self.sums = [torch.zeros_like(p) for p in self.parameters]
        like = self.all_parameters[0]
        self.weight = torch.ones(
            (), device=like.device, dtype=torch.promote_types(like.dtype, torch.float32)
        )
        dtype = self.objective.autocast
        self.read_cast = [] if dtype is None else list(weights_read_cast(self.model))
        self.casts = [torch.empty_like(p, dtype=dtype) for p in self.read_cast]

    def _learn_from(self, output: Any) -> None:
        """Copy an output to the buffer that the graphs of narrower widths read."""
        if self.teacher is None:
            self.teacher = map_tensors(torch.empty_like, output)
        copy_into(self.teacher, output)

    # ---- one configuration -----------------------------------------------------------------------

    def _replay(self, key: Key) -> CapturedPass | None:
        """Replay a configuration; None if it was not captured, or if the network has changed."""
        done = self.captured.get(key)
        if done is None or done.replay is None:
            return None
        if done.statistics.are_elsewhere():
            return None  # such as those that are tracked since then
        self.captured.move_to_end(key)
        done.replay()
        done.statistics.note_replay()
        return done

    def _first_sight(self, key: Key) -> CapturedPass:
        """Run a configuration once for its gradients, then capture it for later steps."""
        loss, output, used = self.capture.run(partial(self._pass, key))
        statistics = ReplayedStatistics(self.model, key[0])
        done = CapturedPass(loss.clone(), map_tensors(torch.clone, output), used, statistics)
        others = [o for o in leaves(output) if o is not None and not isinstance(o, Tensor)]
        if others and self.can_capture:
            self._give_up(f"the output contains a {type(others[0]).__name__}, not only tensors")
        if not self.can_capture:
            return done
        try:
            with assigning_no_buffers(self.model):
                done.replay = self.capture.capture(partial(self._pass_into, done, key))
        except (CaptureError, AssignedBufferError) as error:
            done.replay = None
            self._give_up(str(error))
            return done
        self.captured[key] = done
        while len(self.captured) > self.most_graphs:
            self.captured.popitem(last=False)
        return done

    def _pass_into(self, done: CapturedPass, key: Key) -> None:
        loss, output, _ = self._pass(key)
        done.loss.copy_(loss)
        copy_into(done.output, output)

    def _pass(self, key: Key) -> tuple[Tensor, Any, list[Tensor]]:
        """(loss, output, the sums to which gradients were added)."""
        config, learns = key
        assert self.batch is not None
        teacher = self.teacher if learns else None
        # Backward needs the width too, because it computes checkpointed activations again.
        with at_width(self.model, config), _no_tuning():
            with weights_cast_to(self.read_cast, self.casts):
                loss, output = self.objective.forward(self.model, config, *self.batch, teacher)
            with gradients_added_to(self.parameters, self.sums) as used:
                # The weight is in a buffer: a graph would keep a plain number from its capture.
                weight = self.weight.to(loss.dtype).expand_as(loss)
                found = torch.autograd.grad(loss, self.parameters, weight, allow_unused=True)
        pairs = [(t, g) for t, g in zip(self.sums, found, strict=True) if g is not None]
        used += [total for total, _ in pairs]
        # A single gradient with other strides would make the whole call slow.
        alike = [(total, g) for total, g in pairs if total.stride() == g.stride()]
        if alike:
            torch._foreach_add_([total for total, _ in alike], [g for _, g in alike])
        for total, gradient in pairs:
            if total.stride() != gradient.stride():
                total.add_(gradient)
        return loss.detach(), detached(output), used

    @contextlib.contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Restore gradients that are accumulating in the sums."""
        pairs = zip(self.parameters, self.sums, strict=True)
        kept = [(total, total.clone()) for p, total in pairs if p.grad is total]
        try:
            yield
        finally:
            for total, before in kept:
                total.copy_(before)

    def _give_up(self, reason: str) -> None:
        self.can_capture = False
        self.captured.clear()
        warnings.warn(
            f"this network cannot be captured as a CUDA graph ({reason}); training continues with "
            "the eager engine, which is slower",
            stacklevel=2,
        )


def _no_tuning() -> contextlib.AbstractContextManager[None]:
    """Turn off cuDNN's benchmark mode, which times all algorithms for every new shape."""
    settings = torch.backends.cudnn
    return settings.flags(
        enabled=settings.enabled,
        benchmark=False,
        deterministic=settings.deterministic,
        allow_tf32=settings.allow_tf32,
    )


def _buffer_like(tensor: Tensor) -> Tensor:
    """An empty tensor; images are always channels-last."""
    if tensor.dim() == 4:
        return torch.empty_like(tensor, memory_format=torch.channels_last)
    return torch.empty_like(tensor)
