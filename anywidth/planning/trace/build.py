"""From a finished trace to a plan: what is left of the variables becomes named groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.fx import Node

from anywidth.planning.groups import AttributeSlot, Axis, ChannelGroup, CostTerm, Plan, Segment
from anywidth.planning.trace.attributes import attribute_slots, divide
from anywidth.planning.trace.solver import Pieces, TracedAxis
from anywidth.planning.trace.value import Context, Traced

# For each operation whose sizes are guessed: the full shape and the axes of each of its results.
Guesses = dict[Node, list[tuple[tuple[int, ...], tuple[Axis, ...]]]]


def build_plan(context: Context, tensors: dict[str, Traced]) -> tuple[Plan, Guesses]:
    solver = context.solver
    names, units = _name_groups(context, tensors)
    makers = _layers_by_variable(context, context.makers)
    readers = _layers_by_variable(context, context.readers)
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

    def axis_of(axis: TracedAxis) -> Axis:
        """None where nothing of the axis can ever narrow."""
        pieces = solver.expand(axis or ())
        elastic = any(solver.fixed(variable) is None for variable, _ in pieces)
        return tuple(Segment(group_for(v), m) for v, m in pieces) if elastic else None

    def group_for(variable: int) -> str:
        if variable not in names:  # a constant that was joined with channels: no tensor holds it
            names[variable] = f"constant[{sum(name.startswith('constant[') for name in groups)}]"
            units[variable] = 1
        name = names[variable]
        if name not in groups:
            size = solver.units(variable) * units[variable]
            groups[name] = ChannelGroup(name, size, units[variable], fixed=solver.fixed(variable))
        return name

    def cost_of(layer: str, factor: int, axes: Sequence[Pieces], is_batched: bool) -> CostTerm:
        kept = [(axis, axis_of(axis)) for axis in axes]
        whole = math.prod(solver.size(solver.expand(a)) for a, segments in kept if segments is None)
        elastic = [segments for _, segments in kept if segments is not None]
        examples = context.batch if is_batched else 1
        return CostTerm(layer, *_once_an_example(factor * whole, elastic, examples))

    axes = {name: tuple(axis_of(a) for a in value.axes) for name, value in tensors.items()}
    bound = dict.fromkeys(
        AttributeSlot(path, name, segments, place)
        for path, name, axis, place in context.attributes
        if (segments := axis_of(axis)) is not None
    )
    plan = Plan(
        groups=groups,
        tensors=axes,
        shapes={name: value.shape for name, value in tensors.items()},
        parameters=tuple(name for name, _ in context.model.named_parameters() if name in tensors),
        attributes=[*bound, *attribute_slots(context.model, axes)],
        costs=[cost_of(*term) for term in context.costs],
        inputs=dict(context.inputs),
        outputs={layer: axis_of(axis) for layer, axis in context.makers},
        folds=list(context.folds),
    )
    guesses = {
        node: [
            (value.shape, tuple(axis_of(axis) for axis in value.axes))
            for value in (result if isinstance(result, list) else [result])
        ]
        for node, result in context.guesses.items()
    }
    narrowing = {
        node: results
        for node, results in guesses.items()
        if any(axis is not None for _, axes in results for axis in axes)
    }
    return plan, narrowing


def _once_an_example(
    factor: int, axes: list[tuple[Segment, ...]], examples: int
) -> tuple[int, tuple[tuple[Segment, ...], ...]]:
    """What a product of whole batches takes for one example.

    A reshape may have merged the batch into an elastic axis: heads of all examples, say.
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


def _layers_by_variable(
    context: Context, listed: Sequence[tuple[str, TracedAxis]]
) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for layer, axis in listed:
        for variable, _ in context.solver.expand(axis or ()):
            if layer not in found.setdefault(variable, []):
                found[variable].append(layer)
    return found


def _name_groups(
    context: Context, tensors: dict[str, Traced]
) -> tuple[dict[int, str], dict[int, int]]:
    """A name for every variable that is left, and the channels in one unit of it.

    A group is called after the layer that makes it first. Its unit is the number of channels
    that one unit is in the output of a layer, so that its size is the one a reader expects.
    """
    solver = context.solver
    units: dict[int, int] = {}
    for _, axis in context.makers:
        for variable, m in solver.expand(axis or ()):
            units[variable] = max(units.get(variable, 0), m)
    made = set(units)
    for value in tensors.values():
        for axis in value.axes:
            for variable, m in solver.expand(axis or ()):
                if variable not in made:
                    units[variable] = math.gcd(units.get(variable, 0), m)
    names: dict[int, str] = {}
    taken: set[str] = set()

    def give(axis: TracedAxis, base: str) -> None:
        variables = list(dict.fromkeys(variable for variable, _ in solver.expand(axis or ())))
        fresh = [v for v in variables if v not in names and v in units]
        for variable in fresh:
            name = base if len(fresh) == 1 else f"{base}[{variables.index(variable)}]"
            while name in taken:
                name += "'"
            taken.add(name)
            names[variable] = name

    for layer, axis in context.makers:
        give(axis, layer or "output")
    for name, value in tensors.items():
        for i, axis in enumerate(value.axes):
            give(axis, f"{name}:{i}")
    return names, units
