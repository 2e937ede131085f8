"""From a finished trace to a plan: the remaining variables become named groups."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch.fx import Node

from anywidth.planning.group_roles import with_roles
from anywidth.planning.groups import AttributeSlot, Axis, ChannelGroup, CostTerm, Plan, Segment
from anywidth.planning.trace.attributes import attribute_slots, divide
from anywidth.planning.trace.solver import TracedAxis
from anywidth.planning.trace.trace_findings import Findings, Product

# The beginning of a note about a number that does not follow the width.
STAYING = "scales by the same number at every width,"


class Guess(NamedTuple):
    """The expected behaviour of an operation at another width.

    Args:
        results: the full shape and the axes of each result, if its sizes are guessed.
        number: the factor by which it scales, and the axis of whose size that is a power.
    """

    results: list[tuple[tuple[int, ...], tuple[Axis, ...]]]
    number: tuple[float, tuple[Segment, ...]] | None = None


Guesses = dict[Node, Guess]


def build_plan(found: Findings) -> tuple[Plan, Guesses]:
    solver, model = found.solver, found.known.model
    names, units = _name_groups(found)
    makers = found.layers_by_variable((maker.layer, maker.axis) for maker in found.makers)
    readers = found.layers_by_variable(found.readers)
    groups = {}
    for variable, name in names.items():
        count, unit = solver.units(variable), units[variable]
        fixed = solver.fixed(variable)
        if fixed is None and count == 1:
            fixed = f"is one unit of {unit} channels"
        if fixed is None or variable in makers:
            groups[name] = ChannelGroup(
                name,
                channels=count * unit,
                unit=unit,
                fixed=fixed,
                makers=tuple(makers.get(variable, ())),
                readers=tuple(readers.get(variable, ())),
            )

    order = dict.fromkeys(maker.layer for maker in found.makers)
    attended = {names[v] for axis in found.attended for v, _ in solver.pieces(axis) if v in names}
    groups = with_roles(groups, list(order), attended)

    def axis_of(axis: TracedAxis) -> Axis:
        """None if nothing of the axis can ever narrow."""
        if not solver.is_open(axis):
            return None
        return tuple(Segment(group_for(v), m) for v, m in solver.pieces(axis))

    def group_for(variable: int) -> str:
        if variable not in names:  # a constant that was joined with channels, without a tensor
            names[variable] = f"constant[{sum(name.startswith('constant[') for name in groups)}]"
            units[variable] = 1
        name = names[variable]
        if name not in groups:
            size = solver.units(variable) * units[variable]
            groups[name] = ChannelGroup(name, size, units[variable], fixed=solver.fixed(variable))
        return name

    def cost_of(product: Product) -> CostTerm:
        kept = [(axis, axis_of(axis)) for axis in product.axes]
        whole = math.prod(solver.size(axis) for axis, segments in kept if segments is None)
        elastic = [segments for _, segments in kept if segments is not None]
        examples = found.known.batch if product.is_batched else 1
        factor, axes = _once_an_example(product.factor * whole, elastic, examples)
        fixed = [axis for axis, segments in kept if segments is None]
        held = dict.fromkeys(names.get(v, "") for axis in fixed for v, _ in solver.pieces(axis))
        return CostTerm(product.layer, factor, axes, tuple(name for name in held if name in groups))

    axes = {name: tuple(axis_of(a) for a in value.axes) for name, value in found.tensors.items()}
    followers = dict.fromkeys(
        AttributeSlot(f.path, f.attribute, segments, f.place, f.power, f.whole)
        for f in found.followers
        if (segments := axis_of(f.axis)) is not None
    )
    plan = Plan(
        groups=groups,
        tensors=axes,
        shapes={name: value.shape for name, value in found.tensors.items()},
        parameters=tuple(name for name, _ in model.named_parameters() if name in found.tensors),
        attributes=[*followers, *attribute_slots(model, axes)],
        costs=[cost_of(product) for product in found.products],
        inputs=dict(found.inputs),
        scales={
            name: (segments, power)
            for name, (axis, power) in found.scales.items()
            if (segments := axis_of(axis)) is not None
        },
        folds=list(found.folds),
        notes=[*(f"not counted: {op}" for op in found.uncounted), *found.notes],
    )
    if found.moving:
        places = ", ".join(dict.fromkeys(found.moving))
        plan.notes.append(f"{places}: later parts are other channels at other widths")
    for maker in found.makers:
        axis = axis_of(maker.axis)  # of several, one that narrows
        plan.outputs[maker.layer] = plan.outputs.get(maker.layer) or axis
    guesses: Guesses = {}
    for node, result in found.guesses.items():
        values = result if isinstance(result, list) else [result]
        results = [(v.shape, tuple(axis_of(axis) for axis in v.axes)) for v in values]
        if any(axis is not None for _, axes in results for axis in axes):
            guesses[node] = Guess(results)
    for constant in found.constants:
        if (segments := axis_of(constant.axis)) is not None:
            guesses[constant.node] = Guess([], (constant.number, segments))
    plan.notes += [
        f"{c.place} {STAYING} {c.number:.6g}, which "
        f"{'is a power of' if c.source is None else 'comes from'} {solver.size(c.axis)}"
        for c in found.staying
        if axis_of(c.axis) is not None
    ]
    tried: dict[str, list[str]] = {}
    for follower in found.followers:
        if follower.is_tried and (segments := axis_of(follower.axis)) is not None:
            name = f"{follower.path}.{follower.attribute}".lstrip(".")
            tried.setdefault(segments[0].group, []).append(name)
    plan.notes += [
        f"the attribute {', '.join(dict.fromkeys(names))} follows {group}, as running it showed"
        for group, names in tried.items()
    ]
    return plan, guesses


def _once_an_example(
    factor: int, axes: list[tuple[Segment, ...]], examples: int
) -> tuple[int, tuple[tuple[Segment, ...], ...]]:
    """The cost of a product of a whole batch, for one example.

    A reshape may have merged the batch into an elastic axis, such as the heads of all examples.
    """
    rest = examples // math.gcd(factor, examples)
    factor //= examples // rest
    for place, axis in enumerate(axes):
        merged = len(axis) // rest
        if axis == axis[:merged] * rest:
            part: tuple[Segment, ...] | None = axis[:merged]
        else:
            part = divide(axis, rest)
        if part is not None:
            return factor, (*axes[:place], part, *axes[place + 1 :])
    return factor // rest, tuple(axes)


def _name_groups(found: Findings) -> tuple[dict[int, str], dict[int, int]]:
    """A name for every remaining variable, and the number of channels in one of its units.

    A group is named after the first layer that makes it. A unit is counted in channels of the
    layer's output, so that the group has the size that a reader expects.
    """
    pieces = found.solver.pieces
    units: dict[int, int] = {}
    for maker in found.makers:
        for variable, m in pieces(maker.axis):
            units[variable] = max(units.get(variable, 0), m)
    made = set(units)
    for value in found.tensors.values():
        for axis in value.axes:
            for variable, m in pieces(axis):
                if variable not in made:
                    units[variable] = math.gcd(units.get(variable, 0), m)
    names: dict[int, str] = {}
    taken: set[str] = set()

    def give(axis: TracedAxis, base: str) -> None:
        variables = list(dict.fromkeys(variable for variable, _ in pieces(axis)))
        fresh = [v for v in variables if v not in names and v in units]
        for variable in fresh:
            name = base if len(fresh) == 1 else f"{base}[{variables.index(variable)}]"
            while name in taken:
                name += "'"
            taken.add(name)
            names[variable] = name

    for maker in found.makers:
        give(maker.axis, maker.layer or "output")
    for name, value in found.tensors.items():
        for i, axis in enumerate(value.axes):
            give(axis, f"{name}:{i}")
    return names, units
