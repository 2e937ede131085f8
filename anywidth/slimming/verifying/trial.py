"""Run a converted network at other widths and compare it with extracted networks."""

from __future__ import annotations

import contextlib
import random
import traceback
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anywidth.errors import AnywidthError
from anywidth.planning.groups import Plan
from anywidth.planning.model_outputs import output_leaves
from anywidth.planning.part_calls import RecordedCalls, record_calls
from anywidth.planning.trace.graph import misread_groups
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.norm_statistics import buffers_kept, uncalibrated_allowed
from anywidth.slimming.state import state_of
from anywidth.slimming.verifying.part_outputs import difference, given_outputs, kept_outputs
from anywidth.width import ChannelConfig

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Failure:
    """The failure of a configuration, and the modules that were running."""

    config: ChannelConfig
    message: str
    modules: tuple[str, ...] = ()
    is_training: bool = False


@dataclass
class Trial:
    """A converted network with inputs, and the expected shapes of its outputs.

    Evaluation mode uses one example, training mode the whole batch. Operations in `empty_at` are
    given tensors without entries at full width, so they may be at any width. With `writes` an
    evaluation changes buffers, as the observers of quantization do.

    If parts of the network were planned, `calls` are theirs and `expected` are shapes of their
    outputs. Those of the whole network may change with the width, like the number of boxes.
    """

    model: nn.Module
    plan: Plan
    inputs: tuple[Any, ...]
    expected: list[Any]
    batch: tuple[Any, ...]
    empty_at: set[str]
    writes: bool = False
    calls: RecordedCalls | None = None

    def run(self, model: nn.Module) -> Any:
        """The output; buffers that a forward writes are as before, so that the next can compare."""
        with buffers_kept(model) if self.writes else contextlib.nullcontext():
            return run(model, self.inputs)

    def run_parts(self, model: nn.Module, output: Any) -> Any:
        """What the parts give that were planned; the given output of the network if it was."""
        if self.calls is None:
            return output
        with buffers_kept(model) if self.writes else contextlib.nullcontext():
            return run(*self._planned(model))

    def _planned(self, model: nn.Module) -> tuple[nn.Module, tuple[Any, ...]]:
        """What was planned, with a whole batch: the parts if there are any, or all of the model."""
        if self.calls is None:
            return model, self.batch
        return self.calls.of(model), self.calls.copied()

    def first_failure(self) -> Failure | None:
        for config in sample(self.plan):
            failure = self.failure(config)
            if failure is not None:
                return failure
        failure = self.training_failure(self.plan.narrowest)
        if failure is not None and self.training_failure(self.plan.full) is not None:
            return None  # it fails at full width too
        return failure

    def failure(self, config: ChannelConfig, compare: bool = True) -> Failure | None:
        """The failure of a configuration; None if there is none."""
        state_of(self.model).set(self.model, config)
        try:
            with EmptyTensors(self.empty_at):
                with kept_outputs(self.model, self.plan.parts) as kept:
                    whole = self.run(self.model)
                sliced = self.run_parts(self.model, whole)
        except Exception as error:
            return Failure(config, _message(error), _running_modules(self.model, error))
        if shapes(sliced) != self.expected:
            message = f"the output has shape {shapes(sliced)} instead of {self.expected}"
            return Failure(config, message)
        if compare:
            small = extract_quietly(self.model, config)
            with given_outputs(small, self.plan.parts, kept) as gaps:
                other = self.run(small)
            gaps.append(difference(whole, other))
            if self.calls is not None:
                gaps.append(difference(sliced, self.run_parts(small, other)))
            for gap in gaps:
                if not gap <= TOLERANCE:
                    return Failure(config, f"sliced and extracted outputs differ by {gap:.2g}")
        if has_nan(sliced) or has_nan(whole):
            return Failure(config, "the output has NaN")
        return None

    def training_failure(self, config: ChannelConfig) -> Failure | None:
        """The failure in training mode, in which auxiliary heads run and features may be returned.

        It runs a copy, so that no statistics change, and only what was planned: in this mode the
        whole may want other arguments.
        """
        twin = extract_quietly(self.model, config)
        try:
            with EmptyTensors(self.empty_at):
                found = shapes(run_in_training(*self._planned(twin)))
        except Exception as error:
            modules = _running_modules(twin, error)
            return Failure(config, _message(error), modules, is_training=True)
        if _of_one(found) == _of_one(self.expected):
            return None
        wide = extract_quietly(self.model, self.plan.full)
        whole = shapes(run_in_training(*self._planned(wide)))
        if found == whole:
            return None
        message = f"in training the output has shape {found} instead of {whole}"
        return Failure(config, message, is_training=True)

    def misread_groups(self) -> dict[str, str]:
        """Groups whose channels are at other places in the narrowest network than in the plan."""
        config = self.plan.narrowest
        networks = [extract_quietly(self.model, c) for c in (self.plan.full, config)]
        (whole, batch), (narrow, _) = map(self._planned, networks)
        wrong = misread_groups(whole, narrow, config, batch)
        return {name: message for name, message in wrong.items() if self.plan.can_narrow(name)}

    def is_random(self) -> bool:
        """Whether two passes over one input differ."""
        state_of(self.model).set(self.model, self.plan.full)
        first, second = (self.run(self.model) for _ in range(2))
        return not difference(first, second) <= TOLERANCE

    def culprit(self, failure: Failure) -> str:
        """A group without which the failing configuration would run, found by bisection."""
        plan, config = self.plan, failure.config
        compare = not failure.modules
        free = [group.name for group in plan.elastic() if config[group.name] < group.channels]
        if not free or (compare and self.is_random()):
            raise AnywidthError(
                f"{type(self.model).__name__} cannot be verified: {failure.message}, which does "
                "not depend on the width. Is its forward random in evaluation mode? Make it "
                "repeatable, or convert with verified=False"
            )

        def fails(names: Sequence[str]) -> bool:
            tried = only(plan, config, names)
            if failure.is_training:
                return self.training_failure(tried) is not None
            return self.failure(tried, compare) is not None

        near = [name for name in free if touches(plan, name, failure.modules)]
        if near and len(near) < len(free) and fails(near):
            free = near
        # The shortest failing prefix ends with a group that matters; all of them together fail.
        counts = range(1, len(free))
        return free[bisect_left(counts, True, key=lambda count: fails(free[:count]))]


def make_trial(model: nn.Module, plan: Plan, batch: tuple[Any, ...]) -> Trial:
    """A trial with one example, if the network accepts a batch of one."""
    single = tuple(x[:1] if isinstance(x, Tensor) and x.dim() > 1 else x for x in batch)
    watch, before = EmptyTensors(), [buffer.clone() for buffer in model.buffers()]
    for inputs in [batch] if plan.parts else [single, batch]:
        try:
            with watch:
                output = run(model, inputs)
            break
        except Exception as error:
            if inputs is batch:
                message = f"fails at full width: {_message(error)}"
                raise _cannot_be_verified(model, message) from error
    if has_nan(output):
        raise _cannot_be_verified(model, "has NaN in its output at full width")
    calls = None
    if plan.parts:
        calls = record_calls(model, inputs, plan.parts)
        with watch:
            output = run(calls.of(model), calls.copied())
    expected = shapes(output)
    now = list(model.buffers())
    # Not by their versions, which quantization leaves as they are.
    writes = len(now) != len(before) or any(map(_differ, before, now))
    return Trial(model, plan, inputs, expected, batch, watch.seen, writes, calls)


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or not (one.is_meta or torch.equal(one, other))


def _cannot_be_verified(model: nn.Module, why: str) -> AnywidthError:
    return AnywidthError(
        f"{type(model).__name__} cannot be verified: with the example it {why}. Pass another "
        "example with slimmable(..., example_input=...), or convert with verified=False"
    )


def _message(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def touches(plan: Plan, group: str, modules: Sequence[str]) -> bool:
    """Whether a group has a layer inside one of these modules (except the model itself)."""
    own = plan.groups[group]
    return any(
        layer == path or layer.startswith(f"{path}.")
        for path in modules
        if path
        for layer in (*own.makers, *own.readers)
    )


def _running_modules(model: nn.Module, error: BaseException) -> tuple[str, ...]:
    """Paths of the modules whose code was running when an error was raised, innermost first."""
    paths = {module: path for path, module in model.named_modules()}
    found: list[str] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in paths and paths[module] not in found:
            found.insert(0, paths[module])
    return tuple(found[:3])


# ---- running ---------------------------------------------------------------------------------


class EmptyTensors(TorchDispatchMode):
    """Raise before an operation gets a tensor without entries, which crashes some kernels.

    Args:
        allowed: operations that may get one; None allows all, and `seen` collects them.
    """

    def __init__(self, allowed: Iterable[str] | None = None) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self._allowed = None if allowed is None else set(allowed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        empty = [tuple(x.shape) for x in given if x.numel() == 0]
        if empty:
            name = str(func)
            self.seen.add(name)
            if self._allowed is not None and name not in self._allowed:
                raise RuntimeError(f"{name} is given a tensor without entries, {empty[0]}")
        return func(*args, **(kwargs or {}))


def sample(plan: Plan) -> list[ChannelConfig]:
    """The narrowest, and a few uniform and nonuniform configurations, always the same."""
    chance = random.Random(0)
    low, high = plan.widths.low, plan.widths.high
    uniform = [plan.resolve(low), plan.resolve(chance.uniform(low, high))]
    free = [group.name for group in plan.elastic()]
    nonuniform = [
        plan.resolve({name: chance.uniform(low, high) for name in free}) for _ in range(2)
    ]
    return list(dict.fromkeys(uniform + nonuniform))


def only(plan: Plan, config: ChannelConfig, names: Sequence[str]) -> ChannelConfig:
    """The configuration in which only these groups, and groups tied to them, are narrowed."""
    full, kept = plan.full, set(names)
    channels = {name: config[name] if name in kept else full[name] for name in full}
    for name in plan.base_first():
        tied = plan.groups[name].tied
        if tied is not None:
            channels[name] = channels[tied[0]] * tied[1]
    return full.replace(channels)


def run(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    with torch.no_grad(), uncalibrated_allowed(model):
        return model(*inputs)


def run_in_training(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """A pass in training mode; it restores the random state, but changes the model."""
    model.train()
    gpus = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices=sorted(gpus)):
        return model(*inputs)


def shapes(output: Any) -> list[Any]:
    return [tuple(x.shape) if isinstance(x, Tensor) else x for x in output_leaves(output)]


def _of_one(found: list[Any]) -> list[Any]:
    """Shapes without their first dimension, the batch."""
    return [shape[1:] if isinstance(shape, tuple) else shape for shape in found]


def has_nan(output: Any) -> bool:
    tensors = [x for x in output_leaves(output) if isinstance(x, Tensor) and not x.is_meta]
    return any(bool(x.isnan().any()) for x in tensors)
