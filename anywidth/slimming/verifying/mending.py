"""Add sizes to a plan that Python code hides from the traced graph, and check them by running."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from anywidth.planning.groups import AttributeSlot, ChannelGroup, Plan, Segment
from anywidth.planning.trace.attributes import attribute_slots
from anywidth.slimming.state import state_of
from anywidth.slimming.verifying.trial import Failure, Trial, only
from anywidth.slimming.verifying.unseen_tensors import Narrowed, unseen_tensors
from anywidth.width import ChannelConfig

# Attributes of more modules than this are not tried together.
MOST_MODULES = 16


def mend(trial: Trial, group: str, failure: Failure) -> bool:
    """Try to let a failing group narrow after all; keep the change if it works.

    The graph does not show sizes that Python computes: a number that a module keeps as an
    attribute, or the width of one tensor that is used to reshape another. Both can be added to the
    plan, and running the network shows whether they are right. Only the necessary ones are added,
    because an attribute may equal the group's size by chance.
    """
    if _follow_unseen(trial, group, failure):
        return True
    plan, slots = trial.plan, _fitting_attributes(trial, group, failure)
    sets = [[slot] for slot in slots] + ([slots] if len(slots) > 1 else [])
    ties_with = [ties for ties in (_tied_groups(plan, group), *_multiples(plan, group)) if ties]
    attempts: list[tuple[list[AttributeSlot], dict[str, ChannelGroup]]]
    attempts = [(chosen, {}) for chosen in sets] + [([], ties) for ties in ties_with]
    attempts += [(chosen, ties) for chosen in sets for ties in ties_with]
    for chosen, ties in attempts:
        if not _runs_with(trial, group, failure, chosen, ties):
            continue
        _add(trial, group, failure, chosen, ties)
        return True
    chosen = _one_after_the_other(trial, group, failure, slots)
    if chosen:
        _add(trial, group, failure, chosen, {})
    return bool(chosen)


def _one_after_the_other(
    trial: Trial, group: str, failure: Failure, slots: list[AttributeSlot]
) -> list[AttributeSlot]:
    """Attributes of several modules, each of which checks the size of what it is given."""
    chosen: list[AttributeSlot] = []
    for _ in range(MOST_MODULES):
        if not slots:
            return []
        chosen = chosen + slots
        later = _failure_with(trial, group, failure, chosen, {})
        if later is None:
            return chosen
        known = {(slot.module, slot.attribute) for slot in chosen}
        found = _fitting_attributes(trial, group, later)
        slots = [slot for slot in found if (slot.module, slot.attribute) not in known]
    return []


def _add(
    trial: Trial,
    group: str,
    failure: Failure,
    chosen: list[AttributeSlot],
    ties: dict[str, ChannelGroup],
) -> None:
    """Add attributes and ties with which the network runs to the plan, but only those it needs."""
    plan = trial.plan
    for slot in list(chosen):
        fewer = [other for other in chosen if other != slot]
        if fewer and _runs_with(trial, group, failure, fewer, ties):
            chosen = fewer
    plan.attributes = plan.attributes + chosen
    plan.groups |= ties
    plan.notes += _notes(plan, group, chosen, ties)
    state_of(trial.model).forget()


def _follow_unseen(trial: Trial, group: str, failure: Failure) -> bool:
    """Let tensors follow that the graph does not show, if the network runs then."""
    plan, state = trial.plan, state_of(trial.model)
    axes = unseen_tensors(trial.model, plan, group, failure.modules)
    if not axes:
        return False
    slots = attribute_slots(trial.model, axes)
    before, narrowed = plan.tensors, Narrowed(trial.model, axes)
    plan.tensors = before | axes
    if not _runs_with(trial, group, failure, slots, {}):
        plan.tensors = before
        state.forget()
        state.set(trial.model, plan.full)
        narrowed.undo()
        return False
    plan.attributes = plan.attributes + slots
    plan.notes.append(f"{', '.join(axes)} follow {group} (found by running the network)")
    state.forget()
    return True


def _runs_with(
    trial: Trial,
    group: str,
    failure: Failure,
    slots: list[AttributeSlot],
    ties: dict[str, ChannelGroup],
) -> bool:
    """Whether the network runs with these attributes and ties; the plan is restored."""
    return _failure_with(trial, group, failure, slots, ties) is None


def _failure_with(
    trial: Trial,
    group: str,
    failure: Failure,
    slots: list[AttributeSlot],
    ties: dict[str, ChannelGroup],
) -> Failure | None:
    """The failure with these attributes and ties; the plan is restored."""
    plan, state = trial.plan, state_of(trial.model)
    groups, attributes = plan.groups, plan.attributes
    state.set(trial.model, plan.full)  # the width before may not be one with these ties
    plan.groups, plan.attributes = groups | ties, attributes + slots
    state.forget()
    try:
        config = _narrowed(plan, group, failure.config)
        if config == plan.full:
            return Failure(config, "with these ties nothing narrows")
        failing = trial.training_failure if failure.is_training else trial.failure
        return failing(config)
    finally:
        # While the attributes still follow; afterwards nothing would restore them.
        state.set(trial.model, plan.full)
        plan.groups, plan.attributes = groups, attributes
        state.forget()
        state.set(trial.model, plan.full)


def _notes(
    plan: Plan, group: str, slots: list[AttributeSlot], ties: dict[str, ChannelGroup]
) -> list[str]:
    found = []
    if slots:
        names = ", ".join(f"{slot.module}.{slot.attribute}".lstrip(".") for slot in slots)
        found.append(f"the attribute {names} follows {group} (found by running the network)")
    if ties:
        found.append(
            f"{', '.join(ties)} shrink with {plan.root(group)} (found by running the network)"
        )
    return found


def _narrowed(plan: Plan, group: str, config: ChannelConfig) -> ChannelConfig:
    """A valid configuration in which this group, and all groups tied to it, are narrowed."""
    root, divisor = plan.root(group), plan.widths.divisor
    whole = plan.groups[root].channels
    size = plan.groups[root].round(config[group] * whole / plan.groups[group].channels, divisor)
    if size == whole:  # rounded up: it would show nothing
        size = plan.groups[root].round(whole * plan.widths.low, divisor)
    return only(plan, plan.full.replace({root: size}), [root])


def _fitting_attributes(trial: Trial, group: str, failure: Failure) -> list[AttributeSlot]:
    """Attributes of the failing modules that equal the group's channels or number of units.

    Units are, for example, the heads of attention. Some layers may have other numbers of channels
    per unit than the group is counted in.
    """
    plan = trial.plan
    channels, unit = plan.groups[group].channels, plan.groups[group].unit
    axes = (axis for axes in plan.tensors.values() for axis in axes if axis and len(axis) == 1)
    sizes = {channels // unit * one.per_unit: one.per_unit for (one,) in axes if one.group == group}
    sizes |= {channels // unit: 1, channels: unit}
    known = {(slot.module, slot.attribute) for slot in plan.attributes}
    return [
        AttributeSlot(path, name, (Segment(group, sizes[value]),))
        for path in failure.modules
        for name, value in vars(trial.model.get_submodule(path)).items()
        if isinstance(value, int) and not isinstance(value, bool) and value in sizes
        if not name.startswith("_") and (path, name) not in known
    ]


def _tied_groups(plan: Plan, group: str) -> dict[str, ChannelGroup] | None:
    """The group tied with connected groups of its size; None if there are none."""
    own = plan.groups[group]
    near = [other.name for other in _near(plan, group) if other.channels == own.channels]
    roots = list(dict.fromkeys(plan.root(name) for name in [group, *near]))
    if len(roots) < 2:
        return None
    # The group with the largest unit leads: its sizes are valid for all others.
    lead = max((plan.groups[name] for name in roots), key=lambda other: other.unit)
    tied = [plan.groups[name] for name in roots if name != lead.name]
    if any(other.channels != lead.channels or lead.unit % other.unit for other in tied):
        return None
    return {other.name: replace(other, tied=(lead.name, 1)) for other in tied}


def _multiples(plan: Plan, group: str) -> Iterator[dict[str, ChannelGroup]]:
    """The group tied with a connected group whose channels are a multiple of its own, or a part.

    Such are the features of all heads, and those of one.
    """
    for other in _near(plan, group):
        base, tied = sorted((plan.groups[group], other), key=lambda one: one.channels)
        times, rest = divmod(tied.channels, base.channels)
        is_free = base.tied is None and tied.tied is None
        if is_free and times > 1 and rest == 0 and base.unit * times % tied.unit == 0:
            yield {tied.name: replace(tied, tied=(base.name, times))}


def _near(plan: Plan, group: str) -> list[ChannelGroup]:
    """Other groups that narrow and share a layer with this one."""
    own = plan.groups[group]
    layers = {*own.makers, *own.readers}
    return [
        other
        for other in plan.groups.values()
        if other.name != group
        and plan.can_narrow(other.name)
        and layers & {*other.makers, *other.readers}
    ]
