"""Telling a plan what Python code hid from the traced graph, and checking it by running it."""

from __future__ import annotations

from dataclasses import replace

from anywidth.planning.groups import AttributeSlot, ChannelGroup, Plan, Segment
from anywidth.slimming.state import state_of
from anywidth.slimming.trial import Failure, Trial, only
from anywidth.width import ChannelConfig


def mend(trial: Trial, group: str, failure: Failure) -> bool:
    """Tries what would let a failing group narrow after all; keeps it if it works.

    The graph does not show where a size was worked out in Python: a number that a module keeps
    as an attribute, or the width of one tensor used to reshape another. Either can be said in the
    plan; whether it is true is found by running it. No more is said than it takes: an attribute
    may have the group's size by chance.
    """
    plan, slots = trial.plan, _fitting_attributes(trial, group, failure)
    sets = [[slot] for slot in slots] + ([slots] if len(slots) > 1 else [])
    attempts = [(chosen, False) for chosen in sets] + [([], True)]
    attempts += [(chosen, True) for chosen in sets]
    for chosen, is_tied in attempts:
        ties = _tied_groups(plan, group) if is_tied else {}
        if ties is None or not _runs_with(trial, group, failure, chosen, ties):
            continue
        for slot in list(chosen):
            fewer = [other for other in chosen if other != slot]
            if fewer and _runs_with(trial, group, failure, fewer, ties):
                chosen = fewer
        plan.attributes = plan.attributes + chosen
        plan.groups |= ties
        plan.notes += _notes(plan, group, chosen, ties)
        state_of(trial.model).forget()
        return True
    return False


def _runs_with(
    trial: Trial,
    group: str,
    failure: Failure,
    slots: list[AttributeSlot],
    ties: dict[str, ChannelGroup],
) -> bool:
    """Whether the network runs with these attributes and ties; the plan is left as it was."""
    plan, state = trial.plan, state_of(trial.model)
    groups, attributes = plan.groups, plan.attributes
    plan.groups, plan.attributes = groups | ties, attributes + slots
    state.forget()
    try:
        config = _narrowed(plan, group, failure.config)
        failing = trial.training_failure if failure.is_training else trial.failure
        return failing(config) is None
    finally:
        # While the attributes still follow: once unbound nothing would write them back.
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
        found.append(f"the attribute {names} follows {group}, as running it showed")
    if ties:
        found.append(f"{', '.join(ties)} shrink with {plan.root(group)}, as running it showed")
    return found


def _narrowed(plan: Plan, group: str, config: ChannelConfig) -> ChannelConfig:
    """A valid configuration with this group, and all that is tied with it, narrowed."""
    root = plan.root(group)
    size = plan.groups[root].round(
        config[group] * plan.groups[root].channels / plan.groups[group].channels,
        plan.widths.divisor,
    )
    return only(plan, plan.full.replace({root: size}), [root])


def _fitting_attributes(trial: Trial, group: str, failure: Failure) -> list[AttributeSlot]:
    """Attributes of the failing modules that are the group's channels, or its units, to follow.

    Units are the heads of attention.
    """
    plan = trial.plan
    channels, unit = plan.groups[group].channels, plan.groups[group].unit
    sizes = {channels // unit: 1, channels: unit}
    known = {(slot.module, slot.attribute) for slot in plan.attributes}
    return [
        AttributeSlot(path, name, (Segment(group, sizes[value]),))
        for path in failure.modules
        for name, value in vars(trial.model.get_submodule(path)).items()
        if isinstance(value, int) and not isinstance(value, bool) and value in sizes
        if not name.startswith("_") and (path, name) not in known
    ]


def _tied_groups(plan: Plan, group: str) -> dict[str, ChannelGroup] | None:
    """The group and those of its size that a layer connects it to, tied; None without any."""
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
    lead = max((plan.groups[name] for name in roots), key=lambda other: other.unit)
    tied = [plan.groups[name] for name in roots if name != lead.name]
    if any(other.channels != lead.channels or lead.unit % other.unit for other in tied):
        return None
    return {other.name: replace(other, tied=(lead.name, 1)) for other in tied}
