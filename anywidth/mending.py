"""Telling a plan what Python code hid from the traced graph, and checking it by running it."""

from __future__ import annotations

from anywidth.groups import AttributeSlot, Plan, Segment
from anywidth.state import state_of
from anywidth.trial import Failure, Trial, only
from anywidth.width import ChannelConfig


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
            config = _narrowed(plan, group, failure.config)
            failing = trial.training_failure if failure.is_training else trial.failure
            if failing(config) is None:
                plan.notes += [note for note in notes if note is not None]
                return True
        # While the attributes still follow: once unbound nothing would write them back.
        state.set(trial.model, plan.full)
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
            hidden = name.startswith("_") or (path, name) in known
            if fits and not hidden and value == channels:
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
