"""What a converted network remembers: its plan, and the width it runs at now."""

from __future__ import annotations

from copy import deepcopy
from numbers import Real
from typing import Any

from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import STATE, cut, cut_name, held_tensor, scale_name
from anywidth.planning.groups import Axis, Plan, Segment
from anywidth.slimming.layers import VIEWS, is_narrowed
from anywidth.slimming.norm_statistics import is_switched_norm, norm_values
from anywidth.width import ChannelConfig, Width

# Widths and configurations remembered at most: continuous or nonuniform training draws new ones
# for as long as it runs.
MOST_WIDTHS = 4096
MOST_CONFIGS = 512


class SlimmableState:
    """Kept on the root module under an attribute; never part of `state_dict`."""

    def __init__(self, plan: Plan, average_outputs: bool) -> None:
        self.plan = plan
        self.average_outputs = average_outputs
        self.config = plan.full
        self.width: Width = 1.0
        self._configs: dict[float, ChannelConfig] = {}
        self._lattices: dict[int | None, list[ChannelConfig]] = {}
        self._layout: Layout | None = None
        self._values: dict[ChannelConfig, list[dict[str, Any]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SlimmableState:
        # The layout points at the modules of the original.
        copy = SlimmableState(deepcopy(self.plan), self.average_outputs)
        copy.config, copy.width = self.config, self.width
        return copy

    def resolve(self, width: Width) -> ChannelConfig:
        if isinstance(width, ChannelConfig):
            return width if width in self._values else self.plan.resolve(width)
        if not isinstance(width, Real):
            return self.plan.resolve(width)
        if width not in self._configs:
            if len(self._configs) >= MOST_WIDTHS:
                self._configs.clear()
            self._configs[width] = self.plan.resolve(width)
        return self._configs[width]

    def lattice(self, count: int | None = None) -> list[ChannelConfig]:
        """`plan.lattice`, kept: training draws from it at every step."""
        if count not in self._lattices:
            self._lattices[count] = self.plan.lattice(count)
        return self._lattices[count]

    def set(self, model: nn.Module, width: Width) -> None:
        config = self.resolve(width)
        if self._layout is None:
            self._layout = Layout(model, self.plan, self.average_outputs)
        if config not in self._values:
            if len(self._values) >= MOST_CONFIGS:
                self._values.clear()
            self._values[config] = self._layout.values(config)
        label = self.plan.widths.fraction(width) if isinstance(width, Real) else None
        is_full = config == self.plan.full
        for module, values in zip(self._layout.modules, self._values[config], strict=True):
            attributes = module.__dict__
            attributes.update(values)
            if VIEWS in attributes:
                attributes[VIEWS].clear()
            if is_switched_norm(module):
                attributes.update(norm_values(module, config, is_full, label))
        self.config, self.width = config, width

    def set_full(self, model: nn.Module) -> None:
        """Runs all channels, which is width 1.0 where the range goes so far."""
        self.set(model, self.plan.full)
        self.width = 1.0 if self.plan.widths.high == 1.0 else self.plan.full

    def forget(self) -> None:
        """Drops what was worked out from the plan; to be called when that changes."""
        self._configs.clear()
        self._lattices.clear()
        self._values.clear()
        self._layout = None


def state_of(model: nn.Module) -> SlimmableState:
    """The state of a converted network; a clear error for any other."""
    state = model.__dict__.get(STATE) if isinstance(model, nn.Module) else None
    if state is None:
        hint = ": call anywidth.slimmable(model, plan) first"
        for name in ("module", "_orig_mod"):  # DistributedDataParallel's, torch.compile's
            inner = getattr(model, name, None)
            if isinstance(inner, nn.Module) and STATE in inner.__dict__:
                hint = f"; it wraps a converted network: pass model.{name}"
        raise AnywidthError(f"{type(model).__name__} has not been converted{hint}")
    assert isinstance(state, SlimmableState)
    return state


class Layout:
    """Where a network's widths are written: its modules, and the axes their attributes follow."""

    def __init__(self, model: nn.Module, plan: Plan, average_outputs: bool) -> None:
        self.plan = plan
        self._axes: dict[tuple[Segment, ...], int] = {}
        # For each module: (attribute, axis) pairs of each kind.
        self._cuts: dict[nn.Module, list[tuple[str, int]]] = {}
        self._sizes: dict[nn.Module, list[tuple[str, int, int | None]]] = {}
        self._factors: dict[nn.Module, list[tuple[str, int]]] = {}
        for name, owner, key in tensor_owners(model, plan):
            for index, axis in enumerate(plan.tensors[name]):
                if axis is not None:
                    self._cuts.setdefault(owner, []).append((cut_name(key, index), self._id(axis)))
            if average_outputs and name in plan.inputs:
                inputs = input_axis(plan, name)
                if inputs is not None:
                    self._factors.setdefault(owner, []).append((scale_name(key), self._id(inputs)))
        for slot in plan.attributes:
            module = model.get_submodule(slot.module)
            entry = (slot.attribute, self._id(slot.axis), slot.index)
            self._sizes.setdefault(module, []).append(entry)
        norms = [module for module in model.modules() if is_switched_norm(module)]
        self.modules = list(dict.fromkeys([*self._cuts, *self._sizes, *self._factors, *norms]))
        self._full = [plan.axis_size(axis, plan.full) for axis in self._axes]

    def _id(self, axis: tuple[Segment, ...]) -> int:
        return self._axes.setdefault(axis, len(self._axes))

    def values(self, config: ChannelConfig) -> list[dict[str, Any]]:
        """For each of `modules`, the attributes it gets at a configuration."""
        cuts = [cut(self.plan, axis, config) for axis in self._axes]
        sizes = [c if isinstance(c, int) else sum(length for _, length in c) for c in cuts]
        found: list[dict[str, Any]] = []
        for module in self.modules:
            values: dict[str, Any] = {name: cuts[axis] for name, axis in self._cuts.get(module, ())}
            for name, axis in self._factors.get(module, ()):
                values[name] = self._full[axis] / sizes[axis]
            for name, axis, index in self._sizes.get(module, ()):
                if index is None:
                    values[name] = sizes[axis]
                else:
                    whole = list(values.get(name, getattr(module, name)))
                    whole[index] = sizes[axis]
                    values[name] = tuple(whole)
            found.append(values)
        return found


def input_axis(plan: Plan, name: str) -> Axis:
    """The input axis of a weight that output averaging scales.

    Under weight norm the magnitude is what is scaled, and the direction knows the inputs.
    """
    for magnitude, direction in (("weight_g", "weight_v"), ("original0", "original1")):
        partner = name.removesuffix(magnitude) + direction
        if name.endswith(magnitude) and partner in plan.tensors:
            return plan.tensors[partner][plan.inputs[name]]
    return plan.tensors[name][plan.inputs[name]]


def tensor_owners(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module, str]]:
    """(plan name, module, attribute) wherever a tensor of the plan is held.

    A tensor shared by several modules has one name in the plan and several owners here.
    """
    by_identity: dict[int, str] = {}
    for name in plan.tensors:
        tensor = _tensor(model, name)
        if tensor is not None:
            by_identity[id(tensor)] = name
    return [
        (by_identity[id(tensor)], module, key)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None and id(tensor) in by_identity
    ]


def check_layers(model: nn.Module) -> None:
    """A clear error where a layer that narrows has been replaced by one that does not."""
    plan = state_of(model).plan
    elastic = {n for n, axes in plan.tensors.items() if any(axis is not None for axis in axes)}
    paths = {module: path for path, module in model.named_modules()}
    owners = [owner for name, owner, _ in tensor_owners(model, plan) if name in elastic]
    replaced = [paths[owner] for owner in owners if not is_narrowed(owner)]
    gone = sorted(name for name in elastic if _tensor(model, name) is None)
    replaced += [name.rpartition(".")[0] for name in gone]
    for path in replaced:
        raise AnywidthError(
            f"{path!r} is not the layer that was converted: it was replaced later, as "
            "SyncBatchNorm.convert_sync_batchnorm does too. Do that first, then call "
            "anywidth.slimmable"
        )


def _tensor(model: nn.Module, name: str) -> Tensor | None:
    """A parameter or buffer by its name; None where its module is gone."""
    *path, key = name.split(".")
    module: nn.Module | None = model
    for step in path:
        module = None if module is None else module._modules.get(step)
    return None if module is None else held_tensor(module, key)
