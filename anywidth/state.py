"""What a converted network remembers: its plan, and the width it runs at now."""

from __future__ import annotations

from typing import Any

from torch import nn

from anywidth.errors import AnywidthError
from anywidth.groups import Axis, Plan
from anywidth.layers import Cut, cut_name, is_switched_norm, norm_values, scale_name
from anywidth.width import ChannelConfig, Width

STATE = "_anywidth"
# Nonuniform training meets a new configuration at every step: what was worked out for old ones
# is dropped from time to time.
MOST_CONFIGS = 1024


class SlimmableState:
    """Kept on the root module under an attribute; never part of `state_dict`."""

    def __init__(self, plan: Plan, average_outputs: bool) -> None:
        self.plan = plan
        self.average_outputs = average_outputs
        self.config = plan.full
        self.width: Width = 1.0
        self._configs: dict[float, ChannelConfig] = {}
        self._values: dict[ChannelConfig, list[tuple[nn.Module, dict[str, Any]]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SlimmableState:
        # The cached values point at the modules of the original.
        copy = SlimmableState(self.plan.copy(), self.average_outputs)
        copy.config, copy.width = self.config, self.width
        return copy

    def resolve(self, width: Width) -> ChannelConfig:
        if isinstance(width, ChannelConfig):
            if width not in self._values:
                self.plan.check(width)
            return width
        if width not in self._configs:
            self._configs[width] = self.plan.resolve(width)
        return self._configs[width]

    def set(self, model: nn.Module, width: Width) -> None:
        config = self.resolve(width)
        if config not in self._values:
            if len(self._values) >= MOST_CONFIGS:
                self._values.clear()
            self._values[config] = module_values(model, self.plan, config, self.average_outputs)
        label = None if isinstance(width, ChannelConfig) else float(width)
        is_full = config == self.plan.full
        for module, values in self._values[config]:
            module.__dict__.update(values)
            if "_bank" in module.__dict__:
                module.__dict__.update(norm_values(module, config, is_full, label))
        self.config, self.width = config, width

    def forget(self) -> None:
        """Drops what was worked out from the plan; to be called when that changes."""
        self._configs.clear()
        self._values.clear()


def state_of(model: nn.Module) -> SlimmableState:
    """The state of a converted network; a clear error for any other."""
    state = model.__dict__.get(STATE) if isinstance(model, nn.Module) else None
    if state is None:
        inner = getattr(model, "module", None)
        hint = (
            "; it wraps a converted network: pass model.module"
            if isinstance(inner, nn.Module) and STATE in inner.__dict__
            else ": call anywidth.slimmable(model, plan) first"
        )
        raise AnywidthError(f"{type(model).__name__} has not been converted{hint}")
    assert isinstance(state, SlimmableState)
    return state


def module_values(
    model: nn.Module, plan: Plan, config: ChannelConfig, average_outputs: bool
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """For every module that changes with the width, the attributes it gets at `config`."""
    values: dict[nn.Module, dict[str, Any]] = {}
    for name, owner, key in tensor_owners(model, plan):
        entry = values.setdefault(owner, {})
        for index, axis in enumerate(plan.tensors[name]):
            if axis is not None:
                entry[cut_name(key, index)] = cut(plan, axis, config)
        if average_outputs and name in plan.inputs:
            entry[scale_name(key)] = averaging_factor(plan, name, config)
    for slot in plan.attributes:
        module = model.get_submodule(slot.module)
        entry = values.setdefault(module, {})
        size = plan.axis_size(slot.axis, config)
        if slot.index is None:
            entry[slot.attribute] = size
        else:
            whole = list(entry.get(slot.attribute, getattr(module, slot.attribute)))
            whole[slot.index] = size
            entry[slot.attribute] = tuple(whole)
    for module in model.modules():
        if is_switched_norm(module):
            values.setdefault(module, {})
    return list(values.items())


def cut(plan: Plan, axis: Axis, config: ChannelConfig) -> Cut:
    ranges = plan.axis_ranges(axis or (), config)
    if len(ranges) == 1 and ranges[0][0] == 0:
        return ranges[0][1]
    return ranges


def averaging_factor(plan: Plan, name: str, config: ChannelConfig) -> float:
    """Output averaging: full inputs over active inputs, as a factor of the weight."""
    axes = plan.tensors[_in_axis_tensor(plan, name)]
    axis = axes[plan.inputs[name]]
    if axis is None:
        return 1.0
    return plan.axis_size(axis, plan.full) / plan.axis_size(axis, config)


def _in_axis_tensor(plan: Plan, name: str) -> str:
    """Under weight norm the magnitude is scaled, and the direction knows the inputs."""
    for magnitude, direction in (("weight_g", "weight_v"), ("original0", "original1")):
        if name.endswith(magnitude) and name[: -len(magnitude)] + direction in plan.tensors:
            return name[: -len(magnitude)] + direction
    return name


def tensor_owners(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module, str]]:
    """(plan name, module, attribute) wherever a tensor of the plan is held.

    A tensor shared by several modules has one name in the plan and several owners here.
    """
    by_identity: dict[int, str] = {}
    for name in plan.tensors:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = module._parameters.get(key)
        if tensor is None:
            tensor = module._buffers.get(key)
        if tensor is not None:
            by_identity[id(tensor)] = name
    return [
        (by_identity[id(tensor)], module, key)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None and id(tensor) in by_identity
    ]
