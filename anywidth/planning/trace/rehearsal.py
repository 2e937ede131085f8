"""Run a narrower copy of a network, to see which dimensions its reshapes really narrow.

A graph shows the sizes of a reshape, not how the code computed them: `view(b, 8, c // 8)` appears
as two numbers, and either could be the constant. Rules guess, and a rehearsal checks the guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.fx import Node

from anywidth.planning.cuts import copied, cut, held_tensor, take
from anywidth.planning.groups import Plan
from anywidth.planning.held_numbers import held_number, set_number, with_entry
from anywidth.planning.trace.build import Guesses
from anywidth.planning.trace.nodes import nodes_of, numbers_in, shapes_of
from anywidth.planning.trace.trace_findings import WidthConstant
from anywidth.width import ChannelConfig


def rehearsal_config(plan: Plan) -> ChannelConfig:
    """About half of every elastic group, so that everything that can narrow does."""
    halves = {g.name: (g.channels // g.unit + 1) // 2 * g.unit for g in plan.elastic()}
    return plan.full.replace(halves)


def uneven_config(plan: Plan) -> ChannelConfig:
    """About half of every second elastic group, three quarters of the others.

    Unlike half of every group, this tells groups of one size apart.
    """
    sizes = {}
    for number, group in enumerate(plan.elastic()):
        count = group.channels // group.unit
        kept = (count + 1) // 2 if number % 2 else count - max(1, count // 4)
        sizes[group.name] = max(1, kept) * group.unit
    return plan.full.replace(sizes)


def narrowed_copy(model: nn.Module, plan: Plan, config: ChannelConfig) -> nn.Module:
    """A copy at a configuration, whose tensors are parts of the original's."""
    memo: dict[int, Any] = {}
    for name, axes in plan.tensors.items():
        whole = held_tensor(model, name)
        assert whole is not None
        part = whole.detach()
        if name in plan.scales:
            followed, power = plan.scales[name]
            sizes = [plan.axis_size(followed, c) for c in (config, plan.full)]
            part = part * (sizes[0] / sizes[1]) ** power
        for index, axis in enumerate(axes):
            if axis is not None:
                part = take(part, index, cut(plan, axis, config))
        is_parameter = isinstance(whole, nn.Parameter)
        memo[id(whole)] = nn.Parameter(part, requires_grad=False) if is_parameter else part
    narrow = copied(model, memo)
    for slot in plan.attributes:
        module = narrow.get_submodule(slot.module)
        size: Any = slot.value(*(plan.axis_size(slot.axis, c) for c in (config, plan.full)))
        if slot.index is not None:
            size = with_entry(held_number(module, slot.attribute), slot.index, size)
        set_number(module, slot.attribute, size)
    return narrow


def misread(
    plan: Plan, config: ChannelConfig, guesses: Guesses, full: Any, narrow: Any
) -> dict[Node, int | None]:
    """Operations whose narrow shapes are not as predicted.

    For each, the one dimension that narrows; None if there is no such dimension. `full` and
    `narrow` are the network's graphs at full size and at `config`.
    """
    wrong: dict[Node, int | None] = {}
    for node, twin in _twins(full, narrow):
        if node not in guesses:
            continue
        results, number = guesses[node]
        if number is not None:
            whole, axis = number
            is_narrower = plan.axis_size(axis, config) < plan.axis_size(axis, plan.full)
            if is_narrower and whole in numbers_in(twin):
                wrong[node] = None
            continue
        foretold = [
            tuple(
                n if axis is None else plan.axis_size(axis, config)
                for n, axis in zip(shape, axes, strict=True)
            )
            for shape, axes in results
        ]
        found = shapes_of(twin.meta["val"])
        if found != foretold:
            before = shapes_of(node.meta["val"])
            wrong[node] = _changed(before[0], found[0]) if len(found) == len(before) == 1 else None
    return wrong


def followed_numbers(constants: Iterable[WidthConstant], full: Any, narrow: Any) -> set[Node]:
    """The operations whose number is another one in a narrow network."""
    watched = {constant.node: constant.number for constant in constants}
    return {
        node
        for node, twin in _twins(full, narrow)
        if node in watched and watched[node] not in numbers_in(twin)
    }


def _twins(full: Any, narrow: Any) -> Iterator[tuple[Node, Node]]:
    """The operations of two graphs in pairs, up to where the code took another path."""
    pairs = zip(nodes_of(full.graph_module), nodes_of(narrow.graph_module), strict=False)
    return itertools.takewhile(lambda pair: _operation(pair[0]) == _operation(pair[1]), pairs)


def _operation(node: Node) -> tuple[str, str]:
    return node.op, str(node.target) if node.op == "call_function" else ""


def _changed(before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    if len(before) != len(after):
        return None
    places = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    return places[0] if len(places) == 1 else None
