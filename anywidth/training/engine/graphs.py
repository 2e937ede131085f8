"""The fast engine on a GPU: one CUDA graph a configuration, replayed without Python.

A graph holds forward, loss and backward of one configuration and adds its gradients to buffers
that all graphs share. All graphs live in one memory pool: they run one after the other and leave
nothing in it, because losses, outputs and gradients are copied to buffers outside.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.slimming.convert import at_width
from anywidth.slimming.norm_statistics import (
    Statistics,
    buffers_kept,
    norm_records,
    tracked_statistics,
)
from anywidth.training.engine.capture import CaptureError, CudaCapture
from anywidth.training.engine.eager import EagerEngine
from anywidth.training.engine.passes import Objective, detached
from anywidth.training.engine.trees import copy_into, leaves, map_tensors, signature
from anywidth.training.gpu.fast_layers import weights_read_cast
from anywidth.training.gpu.kernels.shared_buffers import (
    gradients_added_to,
    is_used,
    mark_used,
    weights_cast_to,
)
from anywidth.width import ChannelConfig

# (configuration, whether it learns from a teacher)
Key = tuple[ChannelConfig, bool]


@dataclass
class CapturedPass:
    """A captured pass with the buffers it leaves its results in.

    `tracked` are the running statistics it writes: a replay runs no Python that would notice.
    """

    loss: Tensor
    output: Any
    tracked: list[Statistics]
    replay: Callable[[], None] | None = None


class GraphEngine:
    """Gradients of a step by replaying graphs; a configuration is captured when it is first met.

    Args:
        model: a converted network on a GPU.
        parameters: what is trained: the network's, and those of a loss.
        objective: what the widths are trained for.
        most_graphs: the least recently used graph is dropped beyond this number.
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
        self.places: list[tuple[int, bool]] = []
        self.parameters: list[nn.Parameter] = []
        self.sums: list[Tensor] = []
        self.weight = torch.ones(())  # of the width whose gradients are computed
        self.read_cast: list[Tensor] = []
        self.casts: list[Tensor] = []
        self.teacher: Any = None
        self.bank: dict[ChannelConfig, Statistics] = {}  # of one norm: all know the same widths

    def add_gradients(
        self,
        configs: Sequence[ChannelConfig],
        weights: Sequence[float | Tensor],
        inputs: Any,
        targets: Any,
    ) -> tuple[list[Tensor], list[Any]]:
        """Adds the gradients of all widths to those in the parameters; returns losses, outputs.

        What is returned lies in the engine's buffers and holds until the next step.
        """
        if not self.can_capture or not self._take(inputs, targets):
            return self.fallback.add_gradients(configs, weights, inputs, targets)
        pairs = list(zip(self.parameters, self.sums, strict=True))
        new = [total for parameter, total in pairs if parameter.grad is not total]
        if new:
            torch._foreach_zero_(new)
        losses: list[Tensor] = []
        outputs: list[Any] = []
        for index, config in enumerate(configs):
            key = (config, index > 0 and self.objective.distill is not None)
            weight = weights[index]
            if isinstance(weight, Tensor):
                self.weight.copy_(weight)
            else:
                self.weight.fill_(weight)
            done = self._replay(key) or self._first_sight(key)
            if done is None:
                return self.fallback.add_gradients(configs, weights, inputs, targets)
            if index == 0:
                copy_into(self.teacher, done.output)
            losses.append(done.loss)
            outputs.append(done.output)
        for parameter, total in pairs:
            # Weight decay acts on a gradient of zero, but not on a parameter that takes no part.
            if parameter.grad is None:
                parameter.grad = total if is_used(total) else None
            elif parameter.grad is not total:  # of a backward pass of the user's own
                parameter.grad.add_(total)
        return losses, outputs

    def warm_up(self, configs: Sequence[ChannelConfig], inputs: Any, targets: Any) -> None:
        """Captures configurations ahead, so that none is met for the first time in training.

        The network's weights and running statistics are left as they were.
        """
        self.stray = signature((inputs, targets))  # a batch like those to come
        if not self.can_capture or not self._take(inputs, targets):
            return
        with buffers_kept(self.model):
            for index, config in enumerate(configs):
                key = (config, index > 0 and self.objective.distill is not None)
                if key not in self.captured:
                    done = self._first_sight(key)
                    if done is None or not self.can_capture:
                        return
                    if index == 0 and self.teacher is not None:
                        copy_into(self.teacher, done.output)

    def forget(self) -> None:
        """Drops all graphs and their memory."""
        self.captured.clear()
        self.capture.start_anew()
        self.teacher = None

    # ---- what a step begins with -----------------------------------------------------------------

    def _take(self, inputs: Any, targets: Any) -> bool:
        """Copies a batch into the static buffers; false if this step is not for graphs."""
        batch = (inputs, targets)
        # A number on the CPU works beside tensors on a GPU, but a graph would keep its first value.
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
        if not tensors or not self.capture.reaches(tensors):
            return False
        places = [(p.data_ptr(), p.requires_grad) for p in self.all_parameters]
        if self.batch is None or places != self.places:
            self._start_anew(batch, places)
        elif signature(self.batch) != signature(batch):
            if self.captured and self.stray != signature(batch):
                # The last batch of an epoch, say: not worth every graph.
                self.stray = signature(batch)
                return False
            self._start_anew(batch, places)
        self.stray = None
        copy_into(self.batch, batch)
        if self.casts:
            with torch.no_grad():
                torch._foreach_copy_(self.casts, self.read_cast)
        return True

    def _start_anew(self, batch: tuple[Any, Any], places: list[tuple[int, bool]]) -> None:
        """Buffers for batches like this one, and for the parameters where and as they are now."""
        self.forget()
        self.places = places
        self.parameters = [p for p in self.all_parameters if p.requires_grad]
        self.bank = next((r.bank for r in norm_records(self.model).values()), {})
        self.batch = map_tensors(_buffer_like, batch)
        self.sums = [torch.zeros_like(p) for p in self.parameters]
        self.weight = torch.ones((), device=self.all_parameters[0].device)
        dtype = self.objective.autocast
        self.read_cast = [] if dtype is None else list(weights_read_cast(self.model))
        self.casts = [torch.empty_like(p, dtype=dtype) for p in self.read_cast]

    # ---- one configuration -----------------------------------------------------------------------

    def _replay(self, key: Key) -> CapturedPass | None:
        """Replays a configuration; None if it is not captured, or not as the network is now."""
        done = self.captured.get(key)
        if done is None or done.replay is None:
            return None
        if self.bank.get(key[0]) is not next(iter(done.tracked), None):
            return None  # calibrated since, say: it would not write to these statistics
        self.captured.move_to_end(key)
        done.replay()
        for entry in done.tracked:
            entry.ready = True
        return done

    def _first_sight(self, key: Key) -> CapturedPass | None:
        """Runs a configuration once for its gradients, then captures it for the times to come."""
        loss, output = self.capture.run(partial(self._pass, key))
        others = [leaf for leaf in leaves(output) if not isinstance(leaf, Tensor)]
        if others:
            self._give_up(f"the output holds a {type(others[0]).__name__}, not tensors alone")
            return None
        if self.teacher is None:
            self.teacher = map_tensors(torch.empty_like, output)
        tracked = tracked_statistics(self.model, key[0])
        done = CapturedPass(loss.clone(), map_tensors(torch.clone, output), tracked)
        if not self.can_capture:
            return done
        try:
            done.replay = self.capture.capture(partial(self._pass_into, done, key))
        except CaptureError as error:
            self._give_up(str(error))
            return done
        self.captured[key] = done
        while len(self.captured) > self.most_graphs:
            self.captured.popitem(last=False)
        return done

    def _pass_into(self, done: CapturedPass, key: Key) -> None:
        loss, output = self._pass(key)
        done.loss.copy_(loss)
        copy_into(done.output, output)

    def _pass(self, key: Key) -> tuple[Tensor, Any]:
        config, learns = key
        assert self.batch is not None
        teacher = self.teacher if learns else None
        # The width holds for backward too: checkpointed activations are computed anew there.
        with at_width(self.model, config), _no_tuning():
            with weights_cast_to(self.read_cast, self.casts):
                loss, output = self.objective.forward(self.model, config, *self.batch, teacher)
            with gradients_added_to(self.parameters, self.sums):
                # In a buffer, because a graph keeps the plain numbers it was captured with.
                found = torch.autograd.grad(
                    loss, self.parameters, self.weight.to(loss.dtype), allow_unused=True
                )
        pairs = [(t, g) for t, g in zip(self.sums, found, strict=True) if g is not None]
        for total, _ in pairs:
            mark_used(total)
        # One that lies in memory another way would send all of them down a slow path.
        alike = [(total, g) for total, g in pairs if total.stride() == g.stride()]
        if alike:
            torch._foreach_add_([total for total, _ in alike], [g for _, g in alike])
        for total, gradient in pairs:
            if total.stride() != gradient.stride():
                total.add_(gradient)
        return loss.detach(), detached(output)

    def _give_up(self, reason: str) -> None:
        self.can_capture = False
        self.captured.clear()
        warnings.warn(
            f"this network cannot be captured as a CUDA graph ({reason}); training goes on with "
            "the eager engine, which is slower",
            stacklevel=2,
        )


def _no_tuning() -> contextlib.AbstractContextManager[None]:
    """cuDNN's benchmark mode would time every algorithm anew for each shape of each new width."""
    settings = torch.backends.cudnn
    return settings.flags(
        enabled=settings.enabled,
        benchmark=False,
        deterministic=settings.deterministic,
        allow_tf32=settings.allow_tf32,
    )


def _buffer_like(tensor: Tensor) -> Tensor:
    """Images channels-last, whatever they come in."""
    if tensor.dim() == 4:
        return torch.empty_like(tensor, memory_format=torch.channels_last)
    return torch.empty_like(tensor)
