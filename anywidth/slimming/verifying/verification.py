"""Verify a conversion: the network must run at other widths and equal extracted networks.

Sizes that Python code hides from the traced graph are added to the plan, and checked by running.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from anywidth.errors import AnywidthError
from anywidth.planning.example_inputs import example_inputs
from anywidth.planning.groups import AttributeSlot, Axis, ChannelGroup, Plan, Segment
from anywidth.planning.modes import evaluating
from anywidth.planning.trace.attributes import attribute_slots
from anywidth.slimming.layers import dress, narrow, widen
from anywidth.slimming.record import record_of
from anywidth.slimming.state import state_of
from anywidth.slimming.verifying.trial import Failure, Trial, make_trial, only
from anywidth.width import ChannelConfig

# Attributes of more modules than this are not tried together.
MOST_MODULES = 16

Ties = dict[str, ChannelGroup]
"""Groups that are tied to another from now on."""


def verify(model: nn.Module, *, strict: bool, example_input: Any = None) -> None:
    """Compare sliced and extracted at several configurations; mend or pin groups that fail."""
    state = state_of(model)
    plan = state.plan
    try:
        with evaluating(model):
            _mend_or_pin(model, plan, strict, example_inputs(model, plan, example_input))
    finally:
        state.forget()
        state.set_full(model)


def _mend_or_pin(model: nn.Module, plan: Plan, strict: bool, inputs: tuple[Any, ...]) -> None:
    trial = make_trial(model, plan, inputs)
    is_seen, attributes = plan.rehearsed, list(plan.attributes)
    while True:
        failure = trial.first_failure()
        if failure is None:
            # Newly found attributes did not follow when the plan was made.
            is_seen = is_seen and plan.attributes == attributes
            wrong = {} if is_seen else trial.misread_groups()
            if not wrong:
                return
            is_seen, attributes = True, list(plan.attributes)
        else:
            group = trial.culprit(failure)
            if _Mending(trial, group, failure).works():
                continue
            wrong = {group: failure.message}
        for group, message in wrong.items():
            if strict:
                raise AnywidthError(
                    f"group {group!r} cannot be narrowed: {message}. Pin it with "
                    f"plan.pin({group!r}), or convert with strict=False, which pins it"
                )
            plan.pin(group, f"failed verification: {message}")
            plan.notes.append(f"{group} was pinned: {message}")
        state_of(model).forget()


# ---- mending ------------------------------------------------------------------------------------


class _Mending:
    """Tries to let a failing group narrow after all, and keeps the change if it works.

    The graph does not show sizes that Python computes: a number that a module keeps as an
    attribute, or the width of one tensor that is used to reshape another. Both can be added to the
    plan, and running the network shows whether they are right. Only the necessary ones are added,
    because an attribute may equal the group's size by chance.
    """

    def __init__(self, trial: Trial, group: str, failure: Failure) -> None:
        self.trial, self.group, self.failure = trial, group, failure
        self.plan, self.own = trial.plan, trial.plan.groups[group]
        self.state = state_of(trial.model)

    def works(self) -> bool:
        return self._follow_unseen() or self._follow_attributes()

    def _follow_attributes(self) -> bool:
        """Let attributes follow the group, or other groups, if the network runs then."""
        slots = self._fitting_attributes(self.failure)
        sets = [[slot] for slot in slots] + ([slots] if len(slots) > 1 else [])
        ties_with = [ties for ties in (self._tied_groups(), *self._multiples()) if ties]
        attempts: list[tuple[list[AttributeSlot], Ties]]
        attempts = [(chosen, {}) for chosen in sets] + [([], ties) for ties in ties_with]
        attempts += [(chosen, ties) for chosen in sets for ties in ties_with]
        for chosen, ties in attempts:
            if self._failure_with(chosen, ties) is None:
                self._add(chosen, ties)
                return True
        chosen = self._one_after_the_other(slots)
        if chosen:
            self._add(chosen, {})
        return bool(chosen)

    def _follow_unseen(self) -> bool:
        """Let tensors follow that run, but that no graph shows, if the network runs then.

        Export leaves out what no output needs, such as an unused norm, and fails on code that only
        training runs. Such tensors stay whole in the plan.
        """
        plan, model = self.plan, self.trial.model
        axes = self._unseen_tensors()
        if not axes:
            return False
        slots = attribute_slots(model, axes)
        before, undo = plan.tensors, _narrow_also(model, axes)
        plan.tensors = before | axes
        if self._failure_with(slots, {}) is not None:
            plan.tensors = before
            self.state.forget()
            self.state.set(model, plan.full)
            undo.close()
            return False
        plan.attributes = plan.attributes + slots
        plan.notes.append(f"{', '.join(axes)} follow {self.group} (found by running the network)")
        self.state.forget()
        return True

    def _one_after_the_other(self, slots: list[AttributeSlot]) -> list[AttributeSlot]:
        """Attributes of several modules, each of which checks the size of what it is given."""
        chosen: list[AttributeSlot] = []
        for _ in range(MOST_MODULES):
            if not slots:
                return []
            chosen = chosen + slots
            later = self._failure_with(chosen, {})
            if later is None:
                return chosen
            known = {(slot.module, slot.attribute) for slot in chosen}
            found = self._fitting_attributes(later)
            slots = [slot for slot in found if (slot.module, slot.attribute) not in known]
        return []

    def _add(self, chosen: list[AttributeSlot], ties: Ties) -> None:
        """Add attributes and ties with which the network runs to the plan, but only those it needs.

        Notes in the plan say so.
        """
        plan, found = self.plan, "(found by running the network)"
        for slot in list(chosen):
            fewer = [other for other in chosen if other != slot]
            if fewer and self._failure_with(fewer, ties) is None:
                chosen = fewer
        plan.attributes = plan.attributes + chosen
        plan.groups |= ties
        if chosen:
            names = ", ".join(f"{slot.module}.{slot.attribute}".lstrip(".") for slot in chosen)
            plan.notes.append(f"the attribute {names} follows {self.group} {found}")
        if ties:
            plan.notes.append(f"{', '.join(ties)} shrink with {plan.root(self.group)} {found}")
        self.state.forget()

    def _failure_with(self, slots: list[AttributeSlot], ties: Ties) -> Failure | None:
        """The failure with these attributes and ties; the plan is restored."""
        trial, plan, state = self.trial, self.plan, self.state
        groups, attributes = plan.groups, plan.attributes
        state.set(trial.model, plan.full)  # the width before may not be one with these ties
        plan.groups, plan.attributes = groups | ties, attributes + slots
        state.forget()
        try:
            config = self._narrowed()
            if config == plan.full:
                return Failure(config, "with these ties nothing narrows")
            failing = trial.training_failure if self.failure.is_training else trial.failure
            return failing(config)
        finally:
            # While the attributes still follow; afterwards nothing would restore them.
            state.set(trial.model, plan.full)
            plan.groups, plan.attributes = groups, attributes
            state.forget()
            state.set(trial.model, plan.full)

    def _narrowed(self) -> ChannelConfig:
        """A valid configuration in which this group, and all groups tied to it, are narrowed."""
        plan = self.plan
        root, divisor = plan.groups[plan.root(self.group)], plan.widths.divisor
        channels = self.failure.config[self.group] * root.channels / self.own.channels
        size = root.round(channels, divisor)
        if size == root.channels:  # rounded up: it would show nothing
            size = root.round(root.channels * plan.widths.low, divisor)
        return only(plan, plan.full.replace({root.name: size}), [root.name])

    def _unseen_tensors(self) -> dict[str, tuple[Axis, ...]]:
        """Vectors of the failing modules that are whole and as long as the group, with its axis."""
        names = [
            f"{path}.{key}".lstrip(".")
            for path in self.failure.modules
            for module in [self.trial.model.get_submodule(path)]
            for key in (*module._parameters, *module._buffers)
        ]
        axis = (Segment(self.group, self.own.unit),)
        return {
            name: (axis,)
            for name in names
            if self.plan.tensors.get(name) == (None,)
            and tuple(self.plan.shapes[name]) == (self.own.channels,)
        }

    def _fitting_attributes(self, failure: Failure) -> list[AttributeSlot]:
        """Attributes of the failing modules that equal the group's channels or number of units.

        Units are, for example, the heads of attention. Some layers may have other numbers of
        channels per unit than the group is counted in.
        """
        plan, group = self.plan, self.group
        channels, unit = self.own.channels, self.own.unit
        axes = (axis for axes in plan.tensors.values() for axis in axes if axis and len(axis) == 1)
        per_units = {one.per_unit for (one,) in axes if one.group == group}
        sizes = {channels // unit * per_unit: per_unit for per_unit in per_units}
        sizes |= {channels // unit: 1, channels: unit}
        known = {(slot.module, slot.attribute) for slot in plan.attributes}
        return [
            AttributeSlot(path, name, (Segment(group, sizes[value]),))
            for path in failure.modules
            for name, value in vars(self.trial.model.get_submodule(path)).items()
            if isinstance(value, int) and not isinstance(value, bool) and value in sizes
            if not name.startswith("_") and (path, name) not in known
        ]

    def _tied_groups(self) -> Ties | None:
        """The group tied with connected groups of its size; None if there are none."""
        plan = self.plan
        near = [other.name for other in self._near() if other.channels == self.own.channels]
        roots = list(dict.fromkeys(plan.root(name) for name in [self.group, *near]))
        if len(roots) < 2:
            return None
        # The group with the largest unit leads: its sizes are valid for all others.
        lead = max((plan.groups[name] for name in roots), key=lambda other: other.unit)
        tied = [plan.groups[name] for name in roots if name != lead.name]
        if any(other.channels != lead.channels or lead.unit % other.unit for other in tied):
            return None
        return {other.name: replace(other, tied=(lead.name, 1)) for other in tied}

    def _multiples(self) -> Iterator[Ties]:
        """The group tied with a connected one whose channels are a multiple of its own, or a part.

        Such are the features of all heads, and those of one.
        """
        for other in self._near():
            base, tied = sorted((self.own, other), key=lambda one: one.channels)
            times, rest = divmod(tied.channels, base.channels)
            is_free = base.tied is None and tied.tied is None
            if is_free and times > 1 and rest == 0 and base.unit * times % tied.unit == 0:
                yield {tied.name: replace(tied, tied=(base.name, times))}

    def _near(self) -> list[ChannelGroup]:
        """Other groups that narrow and share a layer with this one."""
        layers = {*self.own.makers, *self.own.readers}
        return [
            other
            for other in self.plan.groups.values()
            if other.name != self.group
            and self.plan.can_narrow(other.name)
            and layers & {*other.makers, *other.readers}
        ]


def _narrow_also(model: nn.Module, names: Iterable[str]) -> contextlib.ExitStack:
    """Let modules see the active part of more tensors; closing the result takes it back."""
    undo = contextlib.ExitStack()
    for name in names:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        record = record_of(module)
        if record is None:
            narrow(module, [key])
            undo.callback(widen, module)
        else:
            undo.callback(_narrow_only, module, record.tensors)
            _narrow_only(module, (*record.tensors, key))
    return undo


def _narrow_only(module: nn.Module, tensors: Iterable[str]) -> None:
    """Give a converted module the class in which exactly these tensors can be cut."""
    record = record_of(module)
    assert record is not None
    record.tensors = tuple(sorted(set(tensors)))
    dress(module)
