"""After a conversion: does the network run at other widths, and equal its extracted twins?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anywidth.errors import AnywidthError
from anywidth.extraction import extract_quietly
from anywidth.groups import AttributeSlot, Plan, Segment
from anywidth.layers import uncalibrated_allowed
from anywidth.state import state_of
from anywidth.width import ChannelConfig

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Failure:
    """What went wrong at a configuration, and which modules were running when it did."""

    config: ChannelConfig
    message: str
    modules: tuple[str, ...] = ()


@dataclass
class Trial:
    """A converted network with inputs to run it on, and the shapes that must come out."""

    model: nn.Module
    plan: Plan
    inputs: tuple[Any, ...]
    expected: list[Any]

    def first_failure(self) -> Failure | None:
        for config in _sample(self.plan):
            failure = self.failure(config)
            if failure is not None:
                return failure
        return None

    def failure(self, config: ChannelConfig, compare: bool = True) -> Failure | None:
        """What goes wrong at a configuration; None if all is well."""
        state_of(self.model).set(self.model, config)
        try:
            sliced = _run(self.model, self.inputs)
        except Exception as error:
            message = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            return Failure(config, message, _running_modules(self.model, error))
        if _shapes(sliced) != self.expected:
            message = f"the output has shape {_shapes(sliced)} instead of {self.expected}"
            return Failure(config, message)
        if compare:
            twin = _run(extract_quietly(self.model, config), self.inputs)
            error = max(map(_difference, tree_leaves(sliced), tree_leaves(twin)), default=0.0)
            if not error <= TOLERANCE:
                return Failure(config, f"sliced and extracted outputs differ by {error:.2g}")
        return None

    def culprit(self, failure: Failure) -> str:
        """One group without which the failing configuration would run: found by bisection."""
        plan, config = self.plan, failure.config
        compare = not failure.modules
        free = [group.name for group in plan.elastic() if config[group.name] < group.channels]

        def fails(names: Sequence[str]) -> bool:
            return self.failure(only(plan, config, names), compare) is not None

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


def verify(model: nn.Module, *, strict: bool, example_input: Any = None) -> None:
    """Compares sliced and extracted at several configurations; mends or pins what fails."""
    state = state_of(model)
    plan = state.plan
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        trial = _trial(model, plan, example_inputs(model, plan, example_input))
        while (failure := trial.first_failure()) is not None:
            group = trial.culprit(failure)
            if mend(trial, group, failure):
                state.forget()
                continue
            if strict:
                raise AnywidthError(
                    f"group {group!r} cannot be narrowed: {failure.message}. Pin it with "
                    f"plan.pin({group!r}), or convert with strict=False to have that done"
                )
            plan.pin(group, f"failed verification: {failure.message}")
            plan.notes.append(f"{group} was pinned: {failure.message}")
            state.forget()
    finally:
        state.forget()
        state.set(model, plan.full)
        state.width = 1.0 if plan.widths.high == 1.0 else plan.full
        for module, mode in modes.items():
            module.training = mode


def _trial(model: nn.Module, plan: Plan, inputs: tuple[Any, ...]) -> Trial:
    """One example is enough, where the network takes one."""
    single = tuple(x[:1] if isinstance(x, Tensor) and x.dim() > 1 else x for x in inputs)
    try:
        return Trial(model, plan, single, _shapes(_run(model, single)))
    except Exception:
        return Trial(model, plan, inputs, _shapes(_run(model, inputs)))


# ---- mending ---------------------------------------------------------------------------------


def mend(trial: Trial, group: str, failure: Failure) -> bool:
    """Tries what would let a failing group narrow after all; keeps it if it works.

    The graph does not show where a size was worked out in Python: a number that a module keeps
    as an attribute, or the width of one tensor used to reshape another. Either can be said in the
    plan; whether it is true is found by running it.
    """
    plan, state = trial.plan, state_of(trial.model)
    groups, attributes = dict(plan.groups), list(plan.attributes)
    for changes in ((_bind_attributes,), (_tie_neighbours,), (_bind_attributes, _tie_neighbours)):
        notes = [change(trial, group, failure) for change in changes]
        if None not in notes:
            state.forget()
            if trial.failure(_narrowed(plan, group, failure.config)) is None:
                plan.notes += [note for note in notes if note is not None]
                return True
        plan.groups, plan.attributes = dict(groups), list(attributes)
        state.forget()
        state.set(trial.model, plan.full)
    return False


def _narrowed(plan: Plan, group: str, config: ChannelConfig) -> ChannelConfig:
    """A valid configuration with this group, and all that is tied with it, narrowed."""
    root = plan.root(group)
    size = plan.groups[root].round(
        config[group] * plan.groups[root].channels / plan.groups[group].channels,
        plan.widths.divisor,
    )
    return only(plan, plan.full.replace({root: size}), [root])


def _bind_attributes(trial: Trial, group: str, failure: Failure) -> str | None:
    """Lets attributes of the failing modules that equal the group's size follow it."""
    plan = trial.plan
    channels, unit = plan.groups[group].channels, plan.groups[group].unit
    known = {(slot.module, slot.attribute) for slot in plan.attributes}
    found = []
    for path in failure.modules:
        for name, value in vars(trial.model.get_submodule(path)).items():
            fits = isinstance(value, int) and not isinstance(value, bool)
            if fits and not name.startswith("_") and (path, name) not in known:
                if value == channels:
                    plan.attributes.append(AttributeSlot(path, name, (Segment(group, unit),)))
                    found.append(f"{path}.{name}".lstrip("."))
    if not found:
        return None
    return f"the attribute {', '.join(found)} follows {group}, as running it showed"


def _tie_neighbours(trial: Trial, group: str, failure: Failure) -> str | None:
    """Lets the group shrink with those of its size that a layer connects it to."""
    plan = trial.plan
    own = plan.groups[group]
    layers = {*own.makers, *own.readers}
    near = [
        other.name
        for other in plan.groups.values()
        if other.name != group
        and other.channels == own.channels
        and plan.can_narrow(other.name)
        and layers & {*other.makers, *other.readers}
    ]
    roots = list(dict.fromkeys(plan.root(name) for name in [group, *near]))
    if len(roots) < 2:
        return None
    # The coarsest group leads: its counts are valid for all the others.
    lead = max(roots, key=lambda name: plan.groups[name].unit)
    for name in roots:
        if name != lead:
            if plan.groups[name].channels != plan.groups[lead].channels:
                return None
            if plan.groups[lead].unit % plan.groups[name].unit:
                return None
            plan.tie(name, lead, 1)
    return f"{', '.join(r for r in roots if r != lead)} shrink with {lead}, as running it showed"


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


def example_inputs(model: nn.Module, plan: Plan, given: Any = None) -> tuple[Any, ...]:
    """Inputs to run the network with: those given, or random ones of the plan's shapes."""
    if given is not None:
        return given if isinstance(given, tuple) else (given,)
    first = next(iter(model.parameters()), None)
    device = first.device if first is not None else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for shape, name in plan.example:
        dtype = getattr(torch, name)
        if dtype.is_floating_point:
            inputs.append(torch.randn(shape, generator=generator, dtype=dtype).to(device))
        else:
            inputs.append(torch.zeros(shape, dtype=dtype, device=device))
    return tuple(inputs)


def _sample(plan: Plan) -> list[ChannelConfig]:
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


def _run(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    with torch.no_grad(), uncalibrated_allowed(model):
        return model(*inputs)


def _shapes(output: Any) -> list[Any]:
    return [tuple(x.shape) if isinstance(x, Tensor) else x for x in tree_leaves(output)]


def _difference(first: Any, second: Any) -> float:
    """Largest difference relative to the largest value; NaN in both counts as equal."""
    if not isinstance(first, Tensor):
        return 0.0 if first == second else float("inf")
    if not first.is_floating_point():
        return 0.0 if torch.equal(first, second) else float("inf")
    scale = max(1.0, float(first.nan_to_num().abs().max())) if first.numel() else 1.0
    both = (first.isnan() & second.isnan()) | (first == second)
    return (
        float(torch.where(both, 0.0, (first - second).abs()).max()) / scale
        if first.numel()
        else 0.0
    )
