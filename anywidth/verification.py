"""After a conversion: does the network run at other widths, and equal its extracted twins?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anywidth.errors import AnywidthError
from anywidth.extraction import extract
from anywidth.groups import Plan
from anywidth.layers import uncalibrated_allowed
from anywidth.state import state_of
from anywidth.width import ChannelConfig

TOLERANCE = 1e-4


def verify(model: nn.Module, *, strict: bool, example_input: Any = None) -> None:
    """Compares sliced and extracted at several configurations; pins the groups that fail."""
    state = state_of(model)
    plan = state.plan
    inputs = example_inputs(model, plan, example_input)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        expected = _shapes(_run(model, inputs))
        while True:
            failure = _first_failure(model, plan, inputs, expected)
            if failure is None:
                return
            config, message = failure
            group = _culprit(model, plan, config, inputs, expected)
            if strict:
                raise AnywidthError(
                    f"group {group!r} cannot be narrowed: {message}. Pin it with "
                    f"plan.pin({group!r}), or convert with strict=False to have that done"
                )
            plan.pin(group, f"failed verification: {message}")
            plan.notes.append(f"{group} was pinned after conversion: {message}")
    finally:
        state.set(model, plan.full)
        state.width = 1.0 if plan.widths.high == 1.0 else plan.full
        for module, mode in modes.items():
            module.training = mode


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


def _first_failure(
    model: nn.Module, plan: Plan, inputs: tuple[Any, ...], expected: list[Any]
) -> tuple[ChannelConfig, str] | None:
    for config in _sample(plan):
        message = _failure(model, config, inputs, expected, compare=True)
        if message is not None:
            return config, message
    return None


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


def _failure(
    model: nn.Module,
    config: ChannelConfig,
    inputs: tuple[Any, ...],
    expected: list[Any],
    compare: bool,
) -> str | None:
    """What goes wrong at a configuration; None if all is well."""
    state_of(model).set(model, config)
    try:
        sliced = _run(model, inputs)
        if _shapes(sliced) != expected:
            return f"the output has shape {_shapes(sliced)} instead of {expected}"
        if compare:
            twin = _run(extract_quietly(model, config), inputs)
            error = max(map(_difference, tree_leaves(sliced), tree_leaves(twin)), default=0.0)
            if not error <= TOLERANCE:
                return f"sliced and extracted outputs differ by {error:.2g}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def extract_quietly(model: nn.Module, config: ChannelConfig) -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return extract(model, config)


def _culprit(
    model: nn.Module,
    plan: Plan,
    config: ChannelConfig,
    inputs: tuple[Any, ...],
    expected: list[Any],
) -> str:
    """One group without which the failing configuration would run: found by bisection."""
    free = [group.name for group in plan.elastic() if config[group.name] < group.channels]

    def fails(names: Sequence[str]) -> bool:
        return _failure(model, only(plan, config, names), inputs, expected, True) is not None

    # The shortest failing prefix ends with a group that matters.
    low, high = 0, len(free)
    while high - low > 1:
        middle = (low + high) // 2
        if fails(free[:middle]):
            high = middle
        else:
            low = middle
    return free[high - 1]


def only(plan: Plan, config: ChannelConfig, names: Sequence[str]) -> ChannelConfig:
    """The configuration with just these groups, and those tied to them, narrowed."""
    full, kept = plan.full, set(names)
    channels = {name: config[name] if name in kept else full[name] for name in full}
    for name in plan._base_first():
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
    return float(torch.where(both, 0.0, (first - second).abs()).max()) / scale if first.numel() else 0.0
