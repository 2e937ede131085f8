"""The state of a converted network: its plan, and its current width."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from numbers import Real
from typing import Any

from torch import nn

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import Cut, cut, cut_size
from anywidth.planning.groups import AttributeSlot, Axis, Plan, Segment
from anywidth.planning.held_numbers import held_number, with_entry, with_numbers
from anywidth.planning.kept_results import forget_results, result_holders
from anywidth.planning.part_calls import named_tensors
from anywidth.slimming.fingerprints import Weights
from anywidth.slimming.layers import is_narrowed
from anywidth.slimming.norm_statistics import norm_records
from anywidth.slimming.record import network_state, record_of
from anywidth.slimming.thread_use import Thread, ThreadUse
from anywidth.width import ChannelConfig, Width

# The largest numbers of cached widths and configurations: continuous or nonuniform training draws
# new ones all the time.
MOST_WIDTHS = 4096
MOST_CONFIGS = 512

Segments = tuple[Segment, ...]
"""An axis that narrows."""

# The values of one module at a configuration: cuts, scales, and the numbers in each configuration
# that it holds; under "" its own attributes.
Values = tuple[dict[str, dict[int, Cut]], dict[str, float], dict[str, dict[str, Any]]]


class SlimmableState:
    """Kept in the record of the root module; never part of `state_dict`."""

    def __init__(self, plan: Plan, average_outputs: bool) -> None:
        self.plan = plan
        self.average_outputs = average_outputs
        self.config = plan.full
        self.width: Width = 1.0
        self.before_backward: Width | None = None  # while backward has set another
        self.weights = Weights(None)
        self.use = ThreadUse()
        self._resolve = lru_cache(MOST_WIDTHS)(plan.resolve)
        self._lattices: dict[Hashable, list[ChannelConfig]] = {}
        self.norms_outside: list[nn.Module] = []  # in the model that contains this network
        # What modules hold at full width, by their path and the attribute's name.
        self.configurations: dict[tuple[str, str], Any] = {}
        self.tables: list[str] = []  # plain attributes that conversion made buffers of
        self._layout: Layout | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """For `copy.deepcopy` and `pickle`: the layout points at the modules of the original."""
        names = ("config", "width", "weights", "use", "norms_outside", "configurations", "tables")
        rest = {name: getattr(self, name) for name in names}
        return SlimmableState, (self.plan, self.average_outputs), rest

    def resolve(self, width: Width) -> ChannelConfig:
        is_hashable = isinstance(width, Real | ChannelConfig)
        return self._resolve(width) if is_hashable else self.plan.resolve(width)

    def cached(
        self, key: Hashable, make: Callable[[Plan], list[ChannelConfig]]
    ) -> list[ChannelConfig]:
        """Configurations that training draws from at every step, made once per key."""
        if key not in self._lattices:
            self._lattices[key] = make(self.plan)
        return self._lattices[key]

    def set(
        self,
        model: nn.Module,
        width: Width,
        thread: Thread | None = None,
        is_lasting: bool = False,
    ) -> None:
        """Set the width, as the running thread or as the one for which it works.

        With `is_lasting`, the thread expects this width until it sets another.
        """
        with self.use.lock:
            config = self.resolve(width)
            if config != self.config:
                self.use.change(model, thread)
            self._write(model, config, width)
            if is_lasting:
                self.use.keep(config)

    @contextlib.contextmanager
    def at(self, model: nn.Module, width: Width, thread: Thread | None = None) -> Iterator[None]:
        """Another width inside a `with` block, in which no other thread may use the network."""
        block = self.use.enter(model, thread)
        try:
            before = self.width
            self.set(model, width, thread)
            try:
                yield
            finally:
                self.set(model, before, thread)
        finally:
            self.use.leave(block)

    def _write(self, model: nn.Module, config: ChannelConfig, width: Width) -> None:
        if self._layout is None:
            self._layout = Layout(model, self)
            if not self.norms_outside:
                self.weights.watch(model)
            for norm in self._layout.norms:
                norm.weights = self.weights
            for record in filter(None, map(record_of, self._layout.modules)):
                record.use = self.use
        label = self.plan.widths.fraction(width) if isinstance(width, Real) else None
        if config != self.config:
            forget_results(self._layout.results)
        self._layout.write(config, config == self.plan.full, label)
        self.weights.verdict, self.weights.is_stale = None, False
        if model.training:
            self.weights.trainings.count += 1
        first = next(iter(self._layout.norms), None)
        if first is not None and not (model.training or first.is_full) and config in first.bank:
            first.is_current(first.bank[config], "")  # a compiled pass cannot do this
            self.weights.verdict = None
        self.config, self.width, self.before_backward = config, width, None

    def include(self, model: nn.Module, network: nn.Module, norms: list[nn.Module]) -> None:
        """Let norms outside the network change with its width; `model` contains all of them."""
        self.norms_outside += norms
        self.weights.watch(model)
        self._layout = None
        self.set(network, self.width)

    def set_full(self, model: nn.Module) -> None:
        """Set all channels, which is width 1.0 if the range includes it."""
        self.set(model, self.plan.full)
        self.width = 1.0 if self.plan.widths.high == 1.0 else self.plan.full

    def forget(self) -> None:
        """Drop everything computed from the plan; call this when the plan changes."""
        self._resolve.cache_clear()
        self._lattices.clear()
        self._layout = None


def state_of(model: nn.Module) -> SlimmableState:
    """The state of a converted network; raises for any other."""
    state = network_state(model) if isinstance(model, nn.Module) else None
    if state is None:
        hint = ": call anywidth.slimmable(model, plan) first"
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        parts = [path for path, module in modules if network_state(module) is not None]
        if parts:
            hint = f" as a whole, but {parts[0]!r} in it has: pass model.{parts[0]}"
        raise AnywidthError(f"{type(model).__name__} has not been converted{hint}")
    return state


class Layout:
    """Where a network keeps its width: records, and attributes such as `in_channels`."""

    def __init__(self, model: nn.Module, state: SlimmableState) -> None:
        self.plan = plan = state.plan
        # Per module: the axes that narrow of each tensor, the axis that scales it, and attributes.
        self._cuts: dict[nn.Module, dict[str, dict[int, Segments]]] = {}
        self._scales: dict[nn.Module, dict[str, tuple[Segments, float]]] = {}
        self._sizes: dict[nn.Module, list[AttributeSlot]] = {}
        for name, owner, key in tensor_owners(model, plan):
            axes = enumerate(plan.tensors[name])
            elastic = {index: axis for index, axis in axes if axis is not None}
            self._cuts.setdefault(owner, {})[key] = elastic
            followed, power = plan.scales.get(name, (None, 0.0))
            if state.average_outputs and name in plan.inputs:
                followed, power = input_axis(plan, name), -1.0
            if followed is not None:
                self._scales.setdefault(owner, {})[key] = (followed, power)
        self._configurations: dict[tuple[nn.Module, str], Any] = {}
        for slot in plan.attributes:
            module = model.get_submodule(slot.module)
            holder = slot.attribute.rpartition(".")[0]
            if holder:
                held = getattr(module, holder)
                whole = state.configurations.setdefault((slot.module, holder), held)
                self._configurations[module, holder] = whole
            self._sizes.setdefault(module, []).append(slot)
        narrowed = [module for module in self._cuts if is_narrowed(module)]
        self.modules = list(dict.fromkeys([*narrowed, *self._sizes]))
        self.results = result_holders(model)
        modules = [model, *state.norms_outside]
        self.norms = [record for one in modules for record in norm_records(one).values()]
        all_axes = {axis for tensor in plan.tensors.values() for axis in tensor if axis is not None}
        all_axes |= {slot.axis for slot in plan.attributes}
        all_axes |= {axis for axis, _ in plan.scales.values()}
        self._full = {axis: plan.axis_size(axis, plan.full) for axis in all_axes}
        self._values_at = lru_cache(MOST_CONFIGS)(self._values)

    def _values(self, config: ChannelConfig) -> list[Values]:
        cuts = {axis: cut(self.plan, axis, config) for axis in self._full}
        sizes = {axis: cut_size(cut) for axis, cut in cuts.items()}
        found: list[Values] = []
        for module in self.modules:
            tensors, scaled = self._cuts.get(module, {}), self._scales.get(module, {})
            attributes: dict[str, dict[str, Any]] = {}
            for slot in self._sizes.get(module, ()):
                value: Any = slot.value(sizes[slot.axis], self._full[slot.axis])
                holder, _, key = slot.attribute.rpartition(".")
                numbers = attributes.setdefault(holder, {})
                if slot.index is not None:
                    held = numbers.get(key, held_number(module, slot.attribute))
                    value = with_entry(held, slot.index, value)
                numbers[key] = value
            found.append(
                (
                    {key: {i: cuts[axis] for i, axis in ax.items()} for key, ax in tensors.items()},
                    {k: (self._full[axis] / sizes[axis]) ** -p for k, (axis, p) in scaled.items()},
                    attributes,
                )
            )
        return found

    def write(self, config: ChannelConfig, is_full: bool, label: float | None) -> None:
        """Set all modules to a configuration; `label` is the width as the user gave it."""
        values = self._values_at(config)
        for module, (cuts, scales, attributes) in zip(self.modules, values, strict=True):
            record = record_of(module)
            if record is not None:
                record.set(cuts, scales)
            for holder, numbers in attributes.items():
                if not holder:
                    module.__dict__.update(numbers)
                    continue
                whole = self._configurations[module, holder]
                module.__dict__[holder] = whole if is_full else with_numbers(whole, numbers)
        for norm in self.norms:
            norm.switch(config, is_full, label)


def input_axis(plan: Plan, name: str) -> Axis:
    """The input axis of a weight that output averaging scales.

    Under weight norm the magnitude is scaled, and the direction has the input axis.
    """
    for magnitude, direction in (("weight_g", "weight_v"), ("original0", "original1")):
        partner = name.removesuffix(magnitude) + direction
        if name.endswith(magnitude) and partner in plan.tensors:
            return plan.tensors[partner][plan.inputs[name]]
    return plan.tensors[name][plan.inputs[name]]


def tensor_owners(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module, str]]:
    """(plan name, module, attribute) for every place of a tensor of the plan.

    A tensor shared by several modules has one name in the plan and several owners here.
    """
    held = dict(named_tensors(model))
    by_identity = {id(held[name]): name for name in plan.tensors if name in held}
    return [
        (by_identity[id(tensor)], module, key)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None and id(tensor) in by_identity
    ]


def check_layers(model: nn.Module) -> None:
    """Raise if a converted layer has been replaced by another."""
    plan = state_of(model).plan
    elastic = {n for n, axes in plan.tensors.items() if any(axis is not None for axis in axes)}
    paths = {module: path for path, module in model.named_modules()}
    owners = [owner for name, owner, _ in tensor_owners(model, plan) if name in elastic]
    replaced = [paths[owner] for owner in owners if not is_narrowed(owner)]
    gone = sorted(elastic.difference(name for name, _ in named_tensors(model)))
    replaced += [name.rpartition(".")[0] for name in gone]
    for path in replaced:
        raise AnywidthError(
            f"{path!r} is not the layer that was converted: it was replaced afterwards, for "
            "example by SyncBatchNorm.convert_sync_batchnorm. Replace layers first, then call "
            "anywidth.slimmable"
        )
