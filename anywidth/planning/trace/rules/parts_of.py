"""How channels pass through operations that cut a tensor in parts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace as Arguments
from typing import NamedTuple

from torch.fx import Node

from anywidth.planning.held_numbers import held_numbers, is_number_of_heads
from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.solver import Pieces, TracedAxis, Unsplittable
from anywidth.planning.trace.value import Traced, shape_of
from anywidth.planning.trace.written_names import written_names

# An attribute, the place in it if it is a list, and the axis whose size it may be.
Binding = tuple[str, int | None, TracedAxis]


def chunk(cursor: Cursor, a: Arguments) -> list[Traced]:
    """Any operation that returns consecutive parts along one dimension."""
    dim = a.dim % len(a.self.shape)
    sizes = [shape_of(meta)[dim] for meta in cursor.meta]
    axis = a.self.axes[dim]
    parts: Sequence[TracedAxis] = [None] * len(sizes)
    if axis is not None:
        is_known = len(set(sizes)) == 1 or _ends_there(cursor, axis, sizes)
        parts = _known_parts(cursor, axis, sizes) if is_known else _unequal(cursor, axis, sizes)
    before, after = a.self.axes[:dim], a.self.axes[dim + 1 :]
    return [
        cursor.output([*before, part, *after], meta)
        for part, meta in zip(parts, cursor.meta, strict=True)
    ]


def _ends_there(cursor: Cursor, axis: Pieces, sizes: Sequence[int]) -> bool:
    ends = {sum(sizes[: i + 1]) for i in range(len(sizes))}
    return cursor.solver.ends(axis).issuperset(ends)


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
    guesses: list[list[Binding]] = [[], *_listed(cursor, parts, sizes)]
    guesses += [[(name, None, parts[0])] for name in cursor.sized_by(sizes[0])]
    guesses += [[(name, None, axis)] for name in cursor.sized_by(sum(sizes))] if is_equal else []
    _bind(cursor, cursor.next_guess(guesses) or [])
    cursor.guess()
    return parts


def _unequal(cursor: Cursor, axis: Pieces, sizes: Sequence[int]) -> Sequence[TracedAxis]:
    """Parts of sizes that the code gives: each that the module keeps as a number may narrow.

    So may one that a module inside it keeps.
    """
    solver, reason = cursor.solver, f"cut into unequal parts {list(sizes)} by {cursor.op}"
    own = [names[:1] for names in _sized_by(cursor, sizes)]
    inner = [
        names or cursor.sized_by_child(size)[:1] for names, size in zip(own, sizes, strict=True)
    ]
    tried = (
        None if cursor.misreading else cursor.next_guess([inner, own] if inner != own else [own])
    )
    try:
        parts = solver.cut(axis, sizes)
    except Unsplittable:
        solver.fix(axis, reason)
        return [None] * len(sizes)
    cursor.guess()
    bindings: list[Binding] = []
    if tried is not None:
        named = [(n[0], None, part) for n, part in zip(tried, parts, strict=True) if n]
        bindings = next(iter(_listed(cursor, parts, sizes)), [*named])
    _bind(cursor, bindings)
    bound = solver.variables(axis for _, _, axis in bindings)
    for part in parts:
        if bound.isdisjoint(solver.variables([part])):
            solver.fix(part, reason)
    return parts


def _sized_by(cursor: Cursor, sizes: Sequence[int]) -> list[list[str]]:
    """For each part the numbers of its size; only those that the statement names, if it does."""
    assert cursor.node is not None
    held = [cursor.sized_by(size) for size in sizes]
    written = written_names(cursor.node)
    named = [[name for name in names if name.rpartition(".")[2] in written] for names in held]
    return named if any(named) else held


def _listed(
    cursor: Cursor, parts: Sequence[TracedAxis], sizes: Sequence[int]
) -> list[list[Binding]]:
    """For each list of the sizes that the module around keeps: its entries, a part for each."""
    held = vars(cursor.module).items()
    names = [n for n, v in held if isinstance(v, list | tuple) and list(v) == list(sizes)]
    return [[(name, i, part) for i, part in enumerate(parts)] for name in names]


def _bind(cursor: Cursor, bindings: Sequence[Binding]) -> None:
    for name, place, axis in bindings:
        if axis is not None:
            child, _, attribute = name.rpartition(".")
            if child in cursor.module._modules:
                path = f"{cursor.layer}.{child}".strip(".")
                cursor.bind(path, attribute, axis, place, is_tried=True)
            else:  # of the module itself, or of a configuration that it holds
                cursor.bind(cursor.layer, name, axis, place, is_tried=True)


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
        if step == 1 and kept > 1:
            axes[a.dim] = _slice_of(cursor, axis, start, kept)
        elif step > 1 and kept * step == full and cursor.misreading is None:
            cursor.guess()  # one of `step` neighbours, such as a gate and what it opens
            axes[a.dim] = cursor.in_units(axis, kept, step)
        if axes[a.dim] is None:
            cursor.solver.fix(axis, f"sliced to {kept} of {full} by {cursor.place}")
    return cursor.output(axes)


def _slice_of(cursor: Cursor, axis: Pieces, start: int, kept: int) -> TracedAxis:
    """One of several equal parts, or as many heads as the module has by a number that it keeps."""
    full = cursor.solver.size(axis)
    numbers: list[Counted | None] = [*_counted(cursor, kept)]
    if full % kept == 0 and start % kept == 0:
        numbers.insert(0 if _is_cut_evenly(cursor) else len(numbers), None)
    times = cursor.misreading.times if cursor.misreading else cursor.failures
    if times >= len(numbers):
        return None
    number = numbers[times] if cursor.misreading else cursor.next_guess(numbers)
    if number is None:
        cursor.guess()
        return cursor.equal_parts(axis, full // kept)[start // kept]
    before, after = [start] if start else [], [full - start - kept] if start + kept < full else []
    try:
        part = cursor.solver.cut(axis, [*before, kept, *after])[len(before)]
    except Unsplittable:
        return None
    cursor.guess()
    _count(cursor, number, part)
    return part


class Counted(NamedTuple):
    """A number that the module keeps, and how many neighbouring entries each of them stands for."""

    name: str
    entries: int


def _counted(cursor: Cursor, size: int) -> list[Counted]:
    """Numbers that may say how long a part is: its size itself, or how many heads are in it."""
    held = held_numbers(cursor.module).items()
    whole = [Counted(name, 1) for name, number in held if number == size]
    return whole + [
        Counted(name, size // number)
        for name, number in held
        if is_number_of_heads(name) and 1 < number < size and size % number == 0
    ]


def _count(cursor: Cursor, number: Counted, part: Pieces) -> None:
    size = cursor.solver.size(part) // number.entries
    units = part if number.entries == 1 else cursor.in_units(part, size, number.entries)
    cursor.bind(cursor.layer, number.name, units, is_tried=True)


def _is_cut_evenly(cursor: Cursor) -> bool:
    """Whether all slices of a tensor along this dimension are of one size."""
    node = cursor.node
    assert node is not None
    whole, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    assert isinstance(whole, Node)
    sizes = {
        shape_of(user.meta["val"])[dim]  # type: ignore[index]
        for user in whole.users
        if user.target == node.target and user.args[1:2] == (dim,)
    }
    return len(sizes) == 1
