"""Trying a converted network at other widths: does it run, and equal its extracted twins?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anywidth.errors import AnywidthError
from anywidth.planning.groups import Plan
from anywidth.planning.trace.graph import misread_groups
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.norm_statistics import uncalibrated_allowed
from anywidth.slimming.state import state_of
from anywidth.width import ChannelConfig

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Failure:
    """What went wrong at a configuration, and which modules were running when it did."""

    config: ChannelConfig
    message: str
    modules: tuple[str, ...] = ()
    is_training: bool = False


@dataclass
class Trial:
    """A converted network with inputs to run it on, and the shapes that must come out.

    One example does in evaluation mode; training mode takes the whole batch.
    """

    model: nn.Module
    plan: Plan
    inputs: tuple[Any, ...]
    expected: list[Any]
    batch: tuple[Any, ...]

    def first_failure(self) -> Failure | None:
        for config in sample(self.plan):
            failure = self.failure(config)
            if failure is not None:
                return failure
        failure = self.training_failure(self.plan.narrowest)
        if failure is not None and self.training_failure(self.plan.full) is not None:
            return None  # it does not train on this batch at full width either
        return failure

    def failure(self, config: ChannelConfig, compare: bool = True) -> Failure | None:
        """What goes wrong at a configuration; None if all is well."""
        state_of(self.model).set(self.model, config)
        try:
            sliced = run(self.model, self.inputs)
        except Exception as error:
            return Failure(config, _message(error), _running_modules(self.model, error))
        if shapes(sliced) != self.expected:
            message = f"the output has shape {shapes(sliced)} instead of {self.expected}"
            return Failure(config, message)
        if compare:
            twin = run(extract_quietly(self.model, config), self.inputs)
            gap = difference(sliced, twin)
            if not gap <= TOLERANCE:
                return Failure(config, f"sliced and extracted outputs differ by {gap:.2g}")
        if has_nan(sliced):
            return Failure(config, "the output has NaN")
        return None

    def training_failure(self, config: ChannelConfig) -> Failure | None:
        """What goes wrong in training mode, where auxiliary heads run and features may be returned.

        A copy is run, so that no statistics change.
        """
        twin = extract_quietly(self.model, config)
        try:
            found = shapes(run_in_training(twin, self.batch))
        except Exception as error:
            modules = _running_modules(twin, error)
            return Failure(config, _message(error), modules, is_training=True)
        if _of_one(found) == _of_one(self.expected):
            return None
        whole = shapes(run_in_training(extract_quietly(self.model, self.plan.full), self.batch))
        if found == whole:
            return None
        message = f"in training the output has shape {found} instead of {whole}"
        return Failure(config, message, is_training=True)

    def misread_groups(self) -> dict[str, str]:
        """Groups whose channels the narrowest network puts elsewhere than the plan thinks."""
        config = self.plan.narrowest
        whole, narrow = (extract_quietly(self.model, c) for c in (self.plan.full, config))
        wrong = misread_groups(whole, narrow, config, self.batch)
        return {name: message for name, message in wrong.items() if self.plan.can_narrow(name)}

    def is_random(self) -> bool:
        """Whether two passes over one input differ."""
        state_of(self.model).set(self.model, self.plan.full)
        first, second = (run(self.model, self.inputs) for _ in range(2))
        return not difference(first, second) <= TOLERANCE

    def culprit(self, failure: Failure) -> str:
        """One group without which the failing configuration would run: found by bisection."""
        plan, config = self.plan, failure.config
        compare = not failure.modules
        free = [group.name for group in plan.elastic() if config[group.name] < group.channels]
        if not free or (compare and self.is_random()):
            raise AnywidthError(
                f"{type(self.model).__name__} cannot be verified: {failure.message}, and not for "
                "its width. Is its forward random in evaluation mode? Make it repeatable, or "
                "convert with verified=False"
            )

        def fails(names: Sequence[str]) -> bool:
            tried = only(plan, config, names)
            if failure.is_training:
                return self.training_failure(tried) is not None
            return self.failure(tried, compare) is not None

        near = [name for name in free if touches(plan, name, failure.modules)]
        if near and len(near) < len(free) and fails(near):
            free = near
        # The shortest failing prefix ends with a group that matters.
        low, high = 0, len(free)
        while high - low > 1:
            middle = (low + high) // 2
            if fails(free[:middle]):
                high = middle
            else:
                low = middle
        return free[high - 1]


def make_trial(model: nn.Module, plan: Plan, batch: tuple[Any, ...]) -> Trial:
    """One example is enough, where the network takes one."""
    inputs = tuple(x[:1] if isinstance(x, Tensor) and x.dim() > 1 else x for x in batch)
    try:
        output = run(model, inputs)
    except Exception:
        inputs = batch
        output = run(model, inputs)
    _check_numbers(model, output)
    expected = shapes(output)
    return Trial(model, plan, inputs, expected, batch)


def _check_numbers(model: nn.Module, output: Any) -> None:
    if has_nan(output):
        raise AnywidthError(
            f"{type(model).__name__} cannot be verified: its output for the example has NaN at "
            "full width. Pass an example for which it gives numbers, "
            "slimmable(..., example_input=...), or convert with verified=False"
        )


def _message(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def touches(plan: Plan, group: str, modules: Sequence[str]) -> bool:
    """Whether a group has a layer inside one of these modules (the model itself aside)."""
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
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in paths and paths[module] not in found:
            found.insert(0, paths[module])
        trace = trace.tb_next
    return tuple(found[:3])


# ---- running ---------------------------------------------------------------------------------


def sample(plan: Plan) -> list[ChannelConfig]:
    """The narrowest, and a few uniform and nonuniform configurations, the same every time."""
    chance = random.Random(0)
    low, high = plan.widths.low, plan.widths.high
    uniform = [plan.resolve(low), plan.resolve(chance.uniform(low, high))]
    free = [group.name for group in plan.elastic()]
    nonuniform = [
        plan.resolve({name: chance.uniform(low, high) for name in free}) for _ in range(2)
    ]
    return list(dict.fromkeys(uniform + nonuniform))


def only(plan: Plan, config: ChannelConfig, names: Sequence[str]) -> ChannelConfig:
    """The configuration with just these groups, and those tied to them, narrowed."""
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
    """A pass in training mode that leaves the random state as it was; the model is changed."""
    model.train()
    with torch.no_grad(), torch.random.fork_rng(devices=_devices(model)):
        return model(*inputs)


def _devices(model: nn.Module) -> list[int]:
    found = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return sorted(device.index for device in found)


def shapes(output: Any) -> list[Any]:
    return [tuple(x.shape) if isinstance(x, Tensor) else x for x in tree_leaves(output)]


def _of_one(found: list[Any]) -> list[Any]:
    """Shapes without their first dimension, the batch."""
    return [shape[1:] if isinstance(shape, tuple) else shape for shape in found]


def has_nan(output: Any) -> bool:
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and not x.is_meta]
    return any(bool(x.isnan().any()) for x in tensors)


def difference(first: Any, second: Any) -> float:
    """The largest gap between two outputs, relative to the largest value; NaN equals NaN here."""
    pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
    return max((_gap(one, other) for one, other in pairs), default=0.0)


def _gap(one: Any, other: Any) -> float:
    if not isinstance(one, Tensor):
        return 0.0 if one == other else float("inf")
    if one.shape != other.shape:
        return float("inf")
    if one.is_meta:
        return 0.0  # there are no values
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    if one.numel() == 0:
        return 0.0
    scale = max(1.0, float(one.nan_to_num().abs().max()))
    equal = (one.isnan() & other.isnan()) | (one == other)
    return float(torch.where(equal, 0.0, (one - other).abs()).max()) / scale
