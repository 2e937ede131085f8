"""What a converted network remembers: its plan, and the width it runs at now."""

from __future__ import annotations

from copy import deepcopy
from numbers import Real
from typing import Any

from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import Cut, cut, cut_size, held_tensor
from anywidth.planning.groups import AttributeSlot, Axis, Plan, Segment
from anywidth.slimming.layers import is_narrowed
from anywidth.slimming.norm_statistics import norm_records
from anywidth.slimming.record import record_of
from anywidth.width import ChannelConfig, Width

# Widths and configurations remembered at most: continuous or nonuniform training draws new ones
# for as long as it runs.
MOST_WIDTHS = 4096
MOST_CONFIGS = 512

# What one module gets at a configuration: its record's cuts and scales, and its attributes.
Values = tuple[dict[str, dict[int, Cut]], dict[str, float], dict[str, Any]]


class SlimmableState:
    """Kept in the record of the root module; never part of `state_dict`."""

    def __init__(self, plan: Plan, average_outputs: bool) -> None:
        self.plan = plan
        self.average_outputs = average_outputs
        self.config = plan.full
        self.width: Width = 1.0
        self._configs: dict[float, ChannelConfig] = {}
        self._lattices: dict[int | None, list[ChannelConfig]] = {}
        self._layout: Layout | None = None
        self._values: dict[ChannelConfig, list[Values]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SlimmableState:
        # The layout points at the modules of the original.
        copy = SlimmableState(deepcopy(self.plan), self.average_outputs)
        copy.config, copy.width = self.config, self.width
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        rest = {"config": self.config, "width": self.width}
        return SlimmableState, (self.plan, self.average_outputs), rest

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
        self._layout.write(self._values[config], config, config == self.plan.full, label)
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
    state = _state(model)
    if state is None:
        hint = ": call anywidth.slimmable(model, plan) first"
        for name in ("module", "_orig_mod"):  # DistributedDataParallel's, torch.compile's
            if _state(getattr(model, name, None)) is not None:
                hint = f"; it wraps a converted network: pass model.{name}"
        raise AnywidthError(f"{type(model).__name__} has not been converted{hint}")
    return state


def _state(model: Any) -> SlimmableState | None:
    record = record_of(model) if isinstance(model, nn.Module) else None
    return None if record is None else record.network


class Layout:
    """Where a network's widths are written: records, and attributes such as `in_channels`."""

    def __init__(self, model: nn.Module, plan: Plan, average_outputs: bool) -> None:
        self.plan = plan
        self._axes: dict[tuple[Segment, ...], int] = {}
        # For each module, the number of an axis by tensor and axis, tensor, and attribute.
        self._cuts: dict[nn.Module, dict[str, dict[int, int]]] = {}
        self._scales: dict[nn.Module, dict[str, tuple[int, float]]] = {}
        self._sizes: dict[nn.Module, list[tuple[AttributeSlot, int]]] = {}
        for name, owner, key in tensor_owners(model, plan):
            axes = enumerate(plan.tensors[name])
            elastic = {index: self._id(axis) for index, axis in axes if axis is not None}
            self._cuts.setdefault(owner, {})[key] = elastic
            followed, power = plan.scales.get(name, (None, 0.0))
            if average_outputs and name in plan.inputs:
                followed, power = input_axis(plan, name), -1.0
            if followed is not None:
                self._scales.setdefault(owner, {})[key] = (self._id(followed), power)
        for slot in plan.attributes:
            module = model.get_submodule(slot.module)
            self._sizes.setdefault(module, []).append((slot, self._id(slot.axis)))
        narrowed = [module for module in self._cuts if is_narrowed(module)]
        self._modules = list(dict.fromkeys([*narrowed, *self._sizes]))
        self._norms = norm_records(model).values()
        self._full = [plan.axis_size(axis, plan.full) for axis in self._axes]

    def _id(self, axis: tuple[Segment, ...]) -> int:
        return self._axes.setdefault(axis, len(self._axes))

    def values(self, config: ChannelConfig) -> list[Values]:
        """What each module gets at a configuration, for `write`."""
        cuts = [cut(self.plan, axis, config) for axis in self._axes]
        sizes = [cut_size(cut) for cut in cuts]
        found: list[Values] = []
        for module in self._modules:
            tensors, scaled = self._cuts.get(module, {}), self._scales.get(module, {})
            attributes: dict[str, Any] = {}
            for slot, axis in self._sizes.get(module, ()):
                value: Any = slot.value(sizes[axis], self._full[axis])
                if slot.index is not None:
                    parts = list(attributes.get(slot.attribute, getattr(module, slot.attribute)))
                    parts[slot.index] = value
                    value = tuple(parts)
                attributes[slot.attribute] = value
            found.append(
                (
                    {key: {i: cuts[axis] for i, axis in ax.items()} for key, ax in tensors.items()},
                    {k: (self._full[axis] / sizes[axis]) ** -p for k, (axis, p) in scaled.items()},
                    attributes,
                )
            )
        return found

    def write(
        self, values: list[Values], config: ChannelConfig, is_full: bool, label: float | None
    ) -> None:
        for module, (cuts, scales, attributes) in zip(self._modules, values, strict=True):
            record = record_of(module)
            if record is not None:
                record.set(cuts, scales)
            module.__dict__.update(attributes)
        for norm in self._norms:
            norm.switch(config, is_full, label)


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
