"""Put the most important channels of a trained network first, before it is made slimmable.

A slimmable network runs on the first channels of each group. In an ordinary trained network the
important channels can be anywhere. Permuting the channels changes nothing at full width and gives
the narrow widths a better start.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import is_converted
from anywidth.planning.example_inputs import example_inputs
from anywidth.planning.groups import Plan
from anywidth.planning.modes import evaluating
from anywidth.planning.part_calls import named_tensors, record_calls
from anywidth.planning.parts import Axis
from anywidth.planning.plain_tensors import tables_as_buffers
from anywidth.planning.trace import plan as make_plan
from anywidth.slimming.verifying.part_outputs import difference
from anywidth.slimming.verifying.trial import TOLERANCE, run

Orders = dict[str, Tensor]


def sort_channels(
    model: nn.Module,
    plan: Plan | None = None,
    importance: Mapping[str, Tensor] | None = None,
    *,
    example_input: Any = None,
) -> None:
    """Put the most important channels of each group first; the network's output stays the same.

    Call it on a trained network before `anywidth.slimmable` and before the optimiser is created,
    because the optimiser's momentum would not be permuted. The outputs at full width before and
    after are compared; if they differ, the network is restored and an error names the group.

    Args:
        model: a network that has not been converted; its parameters and buffers are permuted in
            place.
        plan: from `anywidth.plan`, possibly edited; made here if not given. Fixed groups are not
            sorted.
        importance: group name → one number per unit (a channel, or a whole head); larger means
            more important. By default the norm of the weights that make and read the unit, each
            weight relative to its whole tensor.
        example_input: as for `anywidth.plan`; needed without a plan.

    Example:
        >>> model = torchvision.models.resnet50(weights="DEFAULT")
        >>> plan = anywidth.plan(model, images)
        >>> anywidth.sort_channels(model, plan)
        >>> anywidth.slimmable(model, plan)
    """
    if is_converted(model):
        raise AnywidthError(
            f"{type(model).__name__} (or a part of it) has been converted already: sort its "
            "channels before anywidth.slimmable"
        )
    if plan is None:
        if example_input is None:
            raise AnywidthError(
                "sort_channels() was given neither a plan nor an example input: pass "
                "plan=anywidth.plan(model, x)"
            )
        plan = make_plan(model, example_input)
    with tables_as_buffers(model):
        orders = _orders(model, plan, importance)
        _check_order(_stirred_copy(model), plan, orders)
        _permute(model, plan, orders)


def _check_order(probe: nn.Module, plan: Plan, orders: Orders) -> None:
    """Raise if sorting changes the output of a network."""
    with evaluating(probe):
        output = _outputs(probe, plan)
        before = output()

        def changes_output(orders: Orders) -> bool:
            _permute(probe, plan, orders)
            is_same = _is_same(output(), before)
            _permute(probe, plan, {name: torch.argsort(order) for name, order in orders.items()})
            return not is_same

        if changes_output(orders):
            alone = (name for name, order in orders.items() if changes_output({name: order}))
            culprit = next(alone, next(iter(orders)))
            raise AnywidthError(
                f"group {culprit!r} cannot be sorted: its channels are told apart by their place, "
                f"so the output changes. Leave it out with plan.pin({culprit!r}); to narrow it "
                "nevertheless, sort with a pinned plan.copy()"
            )


def channel_importance(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """Per group, one number per unit: the norm of the weights that make and read it."""
    totals = {
        name: torch.zeros(group.channels // group.unit, dtype=torch.float64)
        for name, group in plan.groups.items()
    }
    held = dict(named_tensors(model))
    for name in plan.parameters:
        tensor = held[name]
        if tensor.dim() < 2:
            continue  # biases and norms say little about the importance of a channel
        squares = tensor.detach().double().cpu().square()
        whole = float(squares.sum()) or 1.0
        for index, axis in enumerate(plan.tensors[name]):
            if axis is None:
                continue
            per_entry = squares.transpose(0, index).flatten(1).sum(1) / whole
            start = 0
            for group, per_unit in axis:
                length = len(totals[group]) * per_unit
                totals[group] += per_entry[start : start + length].view(-1, per_unit).sum(1)
                start += length
    return {name: total.sqrt() for name, total in totals.items()}


def _orders(model: nn.Module, plan: Plan, importance: Mapping[str, Tensor] | None) -> Orders:
    """Per group that can be sorted, its units, the most important first."""
    free = {name: g for name, g in plan.groups.items() if plan.can_narrow(name)}
    for name in importance or {}:
        plan.group(name)
        if name not in free:
            raise AnywidthError(
                f"importance for group {name!r}, which is fixed ({plan.groups[name].fixed}): leave "
                "it out"
            )
    orders: Orders = {}
    by_weights = channel_importance(model, plan)
    for name, group in free.items():
        units = group.channels // group.unit
        if importance is not None and name in importance:
            values = torch.as_tensor(importance[name]).detach().double().cpu().flatten()
            if len(values) != units or not bool(values.isfinite().all()):
                raise AnywidthError(
                    f"importance of group {name!r}: expected {units} finite numbers, one per "
                    f"{'channel' if group.unit == 1 else 'unit'}, not {len(values)}"
                )
        else:
            values = by_weights[name]
        orders[name] = torch.argsort(values, descending=True, stable=True)
    return orders


@torch.no_grad()
def _permute(model: nn.Module, plan: Plan, orders: Orders) -> None:
    held = dict(named_tensors(model))
    for name, axes in plan.tensors.items():
        tensor = held[name]
        for index, axis in enumerate(axes):
            order = _entries(plan, axis, orders)
            if order is not None:
                tensor.copy_(tensor.index_select(index, order.to(tensor.device)))


def _entries(plan: Plan, axis: Axis, orders: Orders) -> Tensor | None:
    """The order of all entries of an axis, from the orders of the groups it is made of."""
    if axis is None or not any(segment.group in orders for segment in axis):
        return None
    parts: list[Tensor] = []
    start = 0
    for name, per_unit in axis:
        units = plan.groups[name].channels // plan.groups[name].unit
        order = orders.get(name, torch.arange(units))
        parts.append(start + (order[:, None] * per_unit + torch.arange(per_unit)).flatten())
        start += units * per_unit
    return torch.cat(parts)


def _stirred_copy(model: nn.Module) -> nn.Module:
    """A copy whose tensors differ between channels; a head of zeros would hide an error."""
    probe = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*probe.parameters(), *probe.buffers()]:
            if (
                tensor.is_floating_point()
                and tensor.dim()
                and bool((tensor == tensor.mean()).all())
            ):
                noise = torch.rand(tensor.shape, generator=generator).to(tensor)
                tensor.add_(0.5 * noise)
    return probe


def _outputs(model: nn.Module, plan: Plan) -> Callable[[], Any]:
    """Computes what sorting must not change: with planned parts, what these give.

    A detector's own output changes with rounding.
    """
    inputs = example_inputs(model, plan)
    if not plan.parts:
        return lambda: run(model, inputs)
    calls = record_calls(model, inputs, plan.parts)
    return lambda: run(calls.of(model), calls.copied())


def _is_same(one: Any, other: Any) -> bool:
    tensors = [x for x in tree_leaves(one) if isinstance(x, Tensor) and x.is_floating_point()]
    sizes = [float(x.abs().max()) for x in tensors if x.numel() > 0]
    return difference(one, other) <= TOLERANCE * min(1.0, max(sizes, default=1.0))
