"""How channels pass through operations that cut a tensor in parts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace as Arguments
from typing import NamedTuple

from torch.fx import Node

from anywidth.planning.held_numbers import held_numbers, is_number_of_heads
from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.known_ints import SizeSource
from anywidth.planning.trace.solver import Pieces, TracedAxis, Unsplittable
from anywidth.planning.trace.trace_findings import Follower
from anywidth.planning.trace.value import Traced, shape_of
from anywidth.planning.trace.written_names import written_names

# An attribute, and the axis whose size it may be.
Binding = tuple[SizeSource, TracedAxis]
# Slices of more equal parts than this count as cut anywhere.
MOST_PARTS = 16


def chunk(cursor: Cursor, a: Arguments) -> list[Traced]:
    """Any operation that returns consecutive parts along one dimension."""
    dim = a.dim % len(a.self.shape)
    sizes = [shape_of(meta)[dim] for meta in cursor.meta]
    axis = a.self.axes[dim]
    parts: Sequence[TracedAxis] = [None] * len(sizes)
    if axis is not None:
        ends_there = cursor.solver.ends(axis).issuperset(itertools.accumulate(sizes))
        is_known = ends_there or len(set(sizes)) == 1
        parts = _known_parts(cursor, axis, sizes) if is_known else _unequal(cursor, axis, sizes)
    before, after = a.self.axes[:dim], a.self.axes[dim + 1 :]
    return [
        cursor.output([*before, part, *after], meta)
        for part, meta in zip(parts, cursor.meta, strict=True)
    ]


def _known_parts(cursor: Cursor, axis: Pieces, sizes: Sequence[int]) -> Sequence[TracedAxis]:
    """Equal parts, or some that end where pieces of the axis do."""
    if cursor.misreading is not None:
        cursor.solver.fix(axis, f"cut into parts of constant size {sizes} by {cursor.op}")
        return [None] * len(sizes)
    is_equal = len(set(sizes)) == 1
    parts: Sequence[TracedAxis] = (
        cursor.equal_parts(axis, len(sizes)) if is_equal else cursor.solver.cut(axis, sizes)
    )
    # The code may keep a list of the sizes, that of a part, or that of all: `split(self.n // 2)`.
    guesses = [*_from_attributes(cursor, parts), [], *_listed(cursor, parts, sizes)]
    guesses += [[_held(cursor, name, parts[0])] for name in cursor.sized_by(sizes[0])]
    guesses += [[_held(cursor, name, axis)] for name in cursor.sized_by(sum(sizes)) if is_equal]
    for source, followed in cursor.next_guess(guesses) or []:
        cursor.follow(source, followed)
    cursor.guess()
    return parts


def _unequal(cursor: Cursor, axis: Pieces, sizes: Sequence[int]) -> Sequence[TracedAxis]:
    """Parts of sizes that the code gives: each that the module keeps as a number may narrow.

    So may one that a module inside it keeps.
    """
    solver, reason = cursor.solver, f"cut into unequal parts {list(sizes)} by {cursor.op}"
    try:
        parts = solver.cut(axis, sizes)
    except Unsplittable:
        solver.fix(axis, reason)
        return [None] * len(sizes)
    guesses = [*_from_attributes(cursor, parts), *_listed(cursor, parts, sizes)[:1]]
    own = [names[:1] for names in _sized_by(cursor, sizes)]
    inner = [
        names or cursor.sized_by_child(size)[:1] for names, size in zip(own, sizes, strict=True)
    ]
    for held in [inner, own] if inner != own else [own]:
        named = zip(held, parts, strict=True)
        guesses.append([_held(cursor, name, part) for names, part in named for name in names])
    tried = (None if cursor.misreading else cursor.next_guess(guesses)) or []
    cursor.guess()
    for source, followed in tried:
        cursor.follow(source, followed)
    bound = solver.variables(axis for _, axis in tried)
    for part in parts:
        if bound.isdisjoint(solver.variables([part])):
            solver.fix(part, reason)
    return parts


def _sized_by(cursor: Cursor, sizes: Sequence[int]) -> list[list[str]]:
    """For each part the numbers of its size; only those that the statement names, if it does."""
    held = [cursor.sized_by(size) for size in sizes]
    written = written_names(cursor.node)
    named = [[name for name in names if name.rpartition(".")[2] in written] for names in held]
    return named if any(named) else held


def _from_attributes(cursor: Cursor, parts: Sequence[TracedAxis]) -> list[list[Binding]]:
    """The attributes that the sizes of parts come from, if a run showed any."""
    sources = [(cursor.source(place), part) for place, part in enumerate(parts)]
    found = [(source, part) for source, part in sources if source is not None]
    return [found] if found else []


def _listed(
    cursor: Cursor, parts: Sequence[TracedAxis], sizes: Sequence[int]
) -> list[list[Binding]]:
    """For each list of the sizes that the module around keeps: its entries, a part for each."""
    held = vars(cursor.module).items()
    names = [n for n, v in held if isinstance(v, list | tuple) and list(v) == list(sizes)]
    return [[_held(cursor, name, part, i) for i, part in enumerate(parts)] for name in names]


def _held(cursor: Cursor, name: str, axis: TracedAxis, place: int | None = None) -> Binding:
    """An attribute of the module around, of one inside it, or of a configuration that it holds."""
    child, _, attribute = name.rpartition(".")
    if child in cursor.module._modules:
        return SizeSource(f"{cursor.layer}.{child}".strip("."), attribute, place), axis
    return SizeSource(cursor.layer, name, place), axis


def without_dim(cursor: Cursor, a: Arguments) -> Traced | list[Traced]:
    """One entry along a dimension, or all of them one by one."""
    axes = cursor.closed(a.self, [a.dim], "taken apart")
    del axes[a.dim]
    return cursor.outputs(axes)


def slice_(cursor: Cursor, a: Arguments) -> Traced:
    full, kept = a.self.shape[a.dim], cursor.shape[a.dim]
    axes = list(a.self.axes)
    axis = axes[a.dim]
    if axis is not None and 0 < kept < full:
        start, step = (a.start or 0) % full, getattr(a, "step", 1)
        axes[a.dim] = None
        if cursor.gives_shape and (step > 1 or kept == 1):
            return cursor.output(axes)
        if step > 1 and kept * step == full and cursor.misreading is None:
            # One of `step` neighbours, such as a gate and what it opens.
            axes[a.dim] = cursor.in_units(axis, kept, step)
        elif step == 1:
            axes[a.dim] = _row(cursor, axis, start, start + kept)
        if axes[a.dim] is not None:
            cursor.guess()
        else:
            cursor.solver.fix(axis, f"sliced to {kept} of {full} by {cursor.place}")
    return cursor.output(axes)


# What neighbouring entries of an axis, from one place to another, are.
Reading = Callable[[Cursor, Pieces, int, int], TracedAxis]


def _row(cursor: Cursor, axis: Pieces, start: int, end: int) -> TracedAxis:
    """Neighbouring entries: up to an attribute, as many as a number says, or equal parts."""
    part = math.gcd(start, end, cursor.solver.size(axis))
    guesses: list[Reading] = []
    if end - start > 1:
        is_one = part == end - start and _is_cut_evenly(cursor)
        if not is_one:  # equal parts are not by chance: if a size is wrong, another guess was
            guesses += [functools.partial(_counted_by, n) for n in _counted(cursor, end - start)]
        if part > 1 and cursor.solver.size(axis) // part <= MOST_PARTS:
            guesses.append(_of_equal_parts)
    if cursor.source(0) or cursor.source(1):
        guesses.insert(0, _up_to_attributes)
    if cursor.misreading is not None:
        guess = next(iter(guesses[cursor.misreading.times :]), None)
    elif guesses == [_of_equal_parts]:
        cursor.guess()
        guess = _of_equal_parts
    else:
        guess = cursor.next_guess([*guesses, None])
    try:
        return None if guess is None else guess(cursor, axis, start, end)
    except Unsplittable:
        return None


def _of_equal_parts(cursor: Cursor, axis: Pieces, start: int, end: int) -> TracedAxis:
    size = cursor.solver.size(axis)
    part = math.gcd(start, end, size)
    parts = cursor.equal_parts(axis, size // part)[start // part : end // part]
    return None if parts[0] is None else tuple(piece for one in parts for piece in one or ())


def _up_to_attributes(cursor: Cursor, axis: Pieces, start: int, end: int) -> TracedAxis:
    """Entries from or to a number that a module keeps: the parts before, between and after."""
    before, within, after = _around(cursor, axis, start, end)
    for place, (first, rest) in enumerate(((before, True), (before + within, after))):
        if first and not cursor.follow_source(place, first) and rest:
            cursor.solver.fix(first, f"cut at a constant place by {cursor.place}")
    return within


def _around(cursor: Cursor, axis: Pieces, start: int, end: int) -> Sequence[Pieces]:
    return cursor.solver.cut(axis, [start, end - start, cursor.solver.size(axis) - end])


class Counted(NamedTuple):
    """A number that the module keeps, and how many neighbouring entries each of them stands for."""

    name: str
    entries: int


def _counted(cursor: Cursor, size: int) -> list[Counted]:
    """Numbers that may say how long a part is: its size itself, or how many heads are in it."""
    return [Counted(name, 1) for name in cursor.sized_by(size)] + [
        Counted(name, size // number)
        for name, number in held_numbers(cursor.module).items()
        if is_number_of_heads(name) and 1 < number < size and size % number == 0
    ]


def _counted_by(number: Counted, cursor: Cursor, axis: Pieces, start: int, end: int) -> TracedAxis:
    """As many entries as a number of the module says."""
    part = _around(cursor, axis, start, end)[1]
    size = (end - start) // number.entries
    units = part if number.entries == 1 else cursor.in_units(part, size, number.entries)
    cursor.bind(Follower(cursor.layer, number.name, units, is_tried=True))
    return part


def _is_cut_evenly(cursor: Cursor) -> bool:
    """Whether all slices of a tensor along this dimension are of one size."""
    node = cursor.node
    whole, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    assert isinstance(whole, Node)
    sizes = {
        shape_of(user.meta["val"])[dim]  # type: ignore[index]
        for user in whole.users
        if user.target == node.target and user.args[1:2] == (dim,)
    }
    return len(sizes) == 1
