"""Numbers that are a power of a number of channels, such as 1/64, or the square root of 64.

They were computed for the full width, usually from an attribute of a module. At another width they
must follow, otherwise the scaled values are too large or too small. A rehearsal shows which do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Node

from anywidth.planning.cuts import held_tensor
from anywidth.planning.held_numbers import held_number, is_number_of_heads, is_size_of_head
from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.known_ints import SizeSource
from anywidth.planning.trace.nodes import CASTS, number_of, numbers_in, op_name, passed_through
from anywidth.planning.trace.rules.products import spelled_out
from anywidth.planning.trace.rules.table import ELEMENTWISE, PRODUCTS, VIEWS
from anywidth.planning.trace.solver import Pieces, TracedAxis
from anywidth.planning.trace.trace_findings import Follower, WidthConstant
from anywidth.planning.trace.value import Traced, shape_of

ROOTS = (0.5, -0.5)
# Of channels that were summed over, their mean.
MEANS = (1.0, -1.0)
# Of fewer channels, powers are numbers that mean anything.
FEWEST = 8
# The largest gain of an activation that weights are scaled by: of GELU 1.7, of sigmoid 4.8.
MOST_GAIN = 5.0
# How many operations back a sum or product may be.
MOST_STEPS = 6
# Products of two tensors, which sum over what these have in common.
SCORES = ("matmul", "bmm", "einsum", "scaled_dot_product_attention")
# Products that are added to each other, of which one number may scale the sum.
SUMMED = ("einsum", "matmul", "bmm")


def look_for_constant(cursor: Cursor) -> None:
    """Report a number by which the present operation multiplies or divides, if it is a power."""
    if _is_power(cursor):
        return
    for number in numbers_in(cursor.node):
        source = _worked_out_from(cursor, number)
        if source is not None:
            _report_source(cursor, source, number)


def _worked_out_from(cursor: Cursor, number: float) -> SizeSource | None:
    is_plain = number in (-1.0, 0.0, 1.0, 2.0)
    return None if is_plain else cursor.found.known.sources.of_number(cursor.node, number)


def _held_size(cursor: Cursor, source: SizeSource) -> int:
    held = held_number(cursor.found.known.model.get_submodule(source.path), source.name)
    size: int = held if source.place is None else held[source.place]
    return size


def _report_source(cursor: Cursor, source: SizeSource, number: float) -> None:
    """Report a number that was worked out from an attribute which has the size of an axis."""
    size = _held_size(cursor, source)
    is_of_head = is_size_of_head(source.name) or is_number_of_heads(source.name)
    features = _scored_features(cursor)
    stays = any(length == size and not cursor.solver.is_open(axis) for length, axis in features)
    # Used as it is, the attribute may mean something else; means of channels are found as powers.
    is_itself = math.isclose(number, size) or math.isclose(number * size, 1)
    if size < FEWEST or is_of_head or stays or is_itself:
        return
    for axis in _related(cursor):
        if cursor.solver.size(axis) == size and cursor.solver.is_open(axis):
            constant = WidthConstant(cursor.node, cursor.place, number, axis, source=source)
            if not _stays_anyway(cursor, constant):
                _report(cursor, constant, is_explained=False)
            return


def _is_power(cursor: Cursor) -> bool:
    """Whether the operation scales by a power of the size of an axis; if so, it is reported."""
    number, tolerance, name = number_of(cursor.node), 1e-6, None
    if number is None and cursor.op in ("mul", "div"):
        number, tolerance, name = _held_number(cursor)
    if number is None or number <= 0:
        return False
    if _is_of_features(cursor, number):
        return True
    inputs = _scaled_inputs(cursor, number) if name is None else None
    if inputs is not None and cursor.solver.is_open(inputs):
        constant = WidthConstant(cursor.node, cursor.place, number, inputs, -0.5)
        _report(cursor, constant, is_explained=False)
        return True
    own = cursor.solver.variables(_axes(cursor, cursor.node))
    for axis in _related(cursor):
        is_summed = own.isdisjoint(cursor.solver.variables([axis]))
        powers = ROOTS + MEANS if is_summed else ROOTS
        power = _power(number, cursor.solver.size(axis), powers, tolerance)
        if power is None or not cursor.solver.is_open(axis):
            continue
        if name is not None:
            cursor.found.scales[name] = (axis, power)
        else:
            constant = WidthConstant(cursor.node, cursor.place, number, axis, power)
            _report(cursor, constant, is_explained=_stays_anyway(cursor, constant))
        return True
    return False


def _scaled_inputs(cursor: Cursor, number: float) -> TracedAxis:
    """The inputs of a weight that is scaled by 1/sqrt(their number times the kernel's), or None.

    The gain of an activation, such as sqrt(2), is often part of the number. What is scaled is the
    weight itself (equalized learning rates), or the scale of a normalised weight (NFNets).
    """
    held = [cursor.values.get(node) for node in cursor.node.all_input_nodes]
    weight = cursor.found.tensors.get(f"{cursor.layer}.weight")
    is_own = all(
        isinstance(v, Traced) and (v.source or "").startswith(f"{cursor.layer}.") for v in held
    )
    if weight is None or not held or not is_own:
        return None
    places = [place for place, size in enumerate(weight.shape) if size > 1]
    first = places[0] if places else 0  # after an axis for the examples
    if len(weight.shape) < first + 2:
        return None
    gain = number * math.sqrt(math.prod(weight.shape[first + 1 :]))
    return weight.axes[first + 1] if 1 - 1e-6 <= gain <= MOST_GAIN else None


def _report(cursor: Cursor, constant: WidthConstant, is_explained: bool) -> None:
    """Let a rehearsal check a number; if it did not follow before, then with an attribute."""
    times = cursor.misreading.times if cursor.misreading else 0
    attributes = _attributes(cursor, constant)
    if times > len(attributes):
        if not is_explained:
            cursor.found.staying.append(constant)
        return
    cursor.found.constants.append(constant)
    if times > 0:
        source, whole, power = attributes[times - 1]
        axis, place = constant.axis, source.place
        cursor.bind(Follower(source.path, source.name, axis, place, power, whole))


def _stays_anyway(cursor: Cursor, constant: WidthConstant) -> bool:
    """Whether an axis that never narrows has this size too, so that the number may be its power."""
    read = [cursor.values.get(node) for node in (constant.node, *constant.node.all_input_nodes)]
    size = cursor.solver.size(constant.axis)
    return any(
        axis is None and length == size
        for value in read
        if isinstance(value, Traced)
        for length, axis in zip(value.shape, value.axes, strict=True)
    )


def _attributes(
    cursor: Cursor, constant: WidthConstant
) -> list[tuple[SizeSource, float | None, float | None]]:
    """Attributes of the module, and of the modules around it, that the number may come from.

    The number of channels itself first, with None; else the value and its power. A number of
    heads, which scales nothing, is the last.
    """
    if constant.source is not None:
        return [(constant.source._replace(ratio=Fraction(1)), None, None)]
    size = cursor.solver.size(constant.axis)
    steps = cursor.layer.split(".") if cursor.layer else []
    kept = [
        (SizeSource(path, name), value)
        for path in [".".join(steps[:count]) for count in range(len(steps), -1, -1)]
        for name, value in vars(cursor.found.known.model.get_submodule(path)).items()
        if type(value) in (int, float) and not name.startswith("_")
    ]
    counts = [held for held, value in kept if type(value) is int and value == size]
    known = _worked_out_from(cursor, constant.number)
    found: list[tuple[SizeSource, float | None, float | None]] = []
    if known is not None and _held_size(cursor, known) == size:
        found.append((known._replace(ratio=Fraction(1)), None, None))
    found += [(held, None, None) for held in counts if not is_number_of_heads(held.name)]
    for held, value in kept:
        if type(value) is float and value > 0:
            if math.isclose(value, constant.number, rel_tol=1e-6):
                found.append((held, value, constant.power))
            elif math.isclose(value * constant.number, 1, rel_tol=1e-6):
                found.append((held, value, -constant.power))
    return found + [(held, None, None) for held in counts if is_number_of_heads(held.name)]


def _held_number(cursor: Cursor) -> tuple[float | None, float, str | None]:
    """The buffer of one number that an operation multiplies by: its value, tolerance and name."""
    for factor in cursor.node.all_input_nodes:
        value = cursor.values.get(passed_through(factor, CASTS))
        if not isinstance(value, Traced) or not cursor.found.is_constant(value) or value.shape:
            continue
        assert value.source is not None
        held = held_tensor(cursor.found.known.model, value.source)
        assert held is not None
        if held.is_floating_point() and not held.is_meta:
            is_short = held.dtype in (torch.float16, torch.bfloat16)
            return float(held), 1e-2 if is_short else 1e-6, value.source
    return None, 0, None


def _is_of_features(cursor: Cursor, number: float) -> bool:
    """Whether a number scales what two tensors have in common by a constant number of features.

    Heads of attention may be as many as each has features; those are summed over, heads are not.
    """
    return any(
        not cursor.solver.is_open(axis) and _power(number, size, ROOTS, 1e-6) is not None
        for size, axis in _scored_features(cursor)
    )


def _scored_features(cursor: Cursor) -> list[tuple[int, TracedAxis]]:
    """The axes that scores before or after an operation sum over, with their sizes."""
    products = _summed_scores(cursor, [cursor.node], SCORES)
    before = [feature for product in products for feature in _features(cursor, product)]
    return before + _later_features(cursor)


def _later_features(cursor: Cursor) -> list[tuple[int, TracedAxis]]:
    """The last axis of a tensor, with its size, if scores of attention will be summed over it."""
    value = cursor.values.get(cursor.node)
    if not isinstance(value, Traced) or not value.shape:
        return []
    left, seen, size = [(cursor.node, MOST_STEPS)], {cursor.node}, value.shape[-1]
    while left:
        passed, steps = left.pop(0)
        for user in passed.users.keys() - seen:
            seen.add(user)
            name = op_name(user.target)
            if name in SCORES and all(n.op != "placeholder" for n in user.all_input_nodes):
                given: Any = user.args[1] if name == "einsum" else user.args[:1]
                if any(shape_of(n.meta["val"])[-1] == size for n in given):
                    return [(size, value.axes[-1])]
            elif steps > 0 and (name in ELEMENTWISE or name in VIEWS):
                left.append((user, steps - 1))
    return []


def _features(cursor: Cursor, product: Node) -> list[tuple[int, TracedAxis]]:
    """The axes that a product of two tensors sums over, with their sizes."""
    is_einsum = op_name(product.target) == "einsum"
    given: Any = product.args[1] if is_einsum else product.args[:2]
    factors = [found for node in given if isinstance(found := cursor.values.get(node), Traced)]
    if not len(factors) == len(given) == 2:
        return []
    first, second = factors
    if not is_einsum:
        return [(first.shape[-1], first.axes[-1])]
    ranks = [len(first.shape), len(second.shape)]
    (one, other), kept = spelled_out(str(product.args[0]), ranks)
    places = [place for place, letter in enumerate(one) if letter in other and letter not in kept]
    return [(first.shape[i], first.axes[i]) for i in places]


def _related(cursor: Cursor) -> Iterator[Pieces]:
    """Axes of what is scaled, and those that were summed over to come to it."""
    node = cursor.node
    yield from _axes(cursor, node)
    for _ in range(MOST_STEPS):
        yield from (axis for read in node.all_input_nodes for axis in _axes(cursor, read))
        tensors = [n for n in node.all_input_nodes if isinstance(cursor.values.get(n), Traced)]
        wide = [n for n in tensors if cursor.values[n].shape]
        if op_name(node.target) not in PRODUCTS and len(wide) > 1:
            for product in _summed_scores(cursor, wide, SUMMED):
                yield from (a for read in product.all_input_nodes for a in _axes(cursor, read))
        if op_name(node.target) in PRODUCTS or len(wide) != 1:
            return
        node = wide[0]


def _summed_scores(cursor: Cursor, terms: Sequence[Node], kinds: Sequence[str]) -> Iterator[Node]:
    """Products that are added before their sum is scaled: scores of content and of position."""
    left = [(node, MOST_STEPS) for node in terms]
    while left:
        node, steps = left.pop(0)
        if op_name(node.target) in kinds:
            yield node
        elif op_name(node.target) not in PRODUCTS and steps > 0:
            read = [n for n in node.all_input_nodes if getattr(cursor.values.get(n), "shape", None)]
            left += [(n, steps - 1) for n in read] if len(read) < 3 else []


def _axes(cursor: Cursor, node: Node) -> list[Pieces]:
    value = cursor.values.get(node)
    return [a for a in value.axes if a is not None] if isinstance(value, Traced) else []


def _power(number: float, size: int, powers: Sequence[float], tolerance: float) -> float | None:
    if size < FEWEST:
        return None
    return next((p for p in powers if math.isclose(number, size**p, rel_tol=tolerance)), None)
