"""How channels pass through a reshape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.solver import Pieces, TracedAxis, Unsplittable, scaled
from anywidth.planning.trace.value import Traced

# An axis repeated more often than this by a merge is not followed any further.
MOST_PIECES = 1024
# Each takes a rehearsal; more are not worth it.
MOST_GUESSES = 4
# Reshapes that are given no sizes.
SIZED_BY_TORCH = ("flatten", "squeeze")


def reshape(cursor: Cursor, value: Traced, shape: Sequence[int]) -> Traced:
    """Matches the old dimensions with the new ones in blocks of equal size."""
    misreading = cursor.misreading
    if misreading is not None and misreading.times > MOST_GUESSES:
        cursor.fix(value, _hidden(cursor))
    inside = shape[1:] if shape[:1] == value.shape[:1] else shape
    if cursor.op not in SIZED_BY_TORCH and sum(n > 1 for n in inside) > 1:
        cursor.guess()
    axes: list[TracedAxis] = []
    old = 0
    new = 0
    while new < len(shape):
        olds, news = [], [new]
        new += 1
        have, want = 1, shape[news[0]]
        while have != want or have == 0:
            if have < want and old < len(value.shape):
                have *= value.shape[old]
                olds.append(old)
                old += 1
            elif have > want and new < len(shape):
                want *= shape[new]
                news.append(new)
                new += 1
            else:
                break
        axes += _block(cursor, value, olds, {i: shape[i] for i in news}).values()
    return cursor.output(axes)


def _block(
    cursor: Cursor, value: Traced, olds: Sequence[int], sizes: Mapping[int, int]
) -> dict[int, TracedAxis]:
    """The new dimensions, given by their sizes, that some of the old ones become."""
    solver, misreading = cursor.solver, cursor.misreading
    kept = [i for i in olds if value.shape[i] > 1]
    elastic = [i for i in kept if value.axes[i] is not None]
    constant: dict[int, TracedAxis] = dict.fromkeys(sizes)
    if len(elastic) > 1:
        for i in elastic:
            cursor.found.merged.append(value.axes[i])
            solver.fix(value.axes[i], f"merged with other channels by {cursor.place}")
    if len(elastic) != 1:
        return constant
    axis = solver.pieces(value.axes[elastic[0]])
    outer = math.prod(value.shape[i] for i in kept if i < elastic[0])
    inner = math.prod(value.shape[i] for i in kept if i > elastic[0])
    if len(axis) * outer > MOST_PIECES:
        solver.fix(axis, f"repeated {outer} times by {cursor.place}")
        return constant
    merged = tuple((variable, m * inner) for variable, m in axis) * outer
    wide = [i for i, size in sizes.items() if size > 1]
    if len(wide) == 1:
        if misreading is not None and misreading.dim != wide[0]:
            _follow_attribute(cursor, merged, sizes[wide[0]], misreading.times)
        return {**constant, wide[0]: merged}
    if misreading is not None and (misreading.dim is None or misreading.times > 1):
        solver.fix(axis, _hidden(cursor))
        return constant
    known = wide.index(misreading.dim) if misreading and misreading.dim in wide else None
    place, found = _split(cursor, merged, [sizes[i] for i in wide], known)
    return {**constant, wide[place]: found}


def _hidden(cursor: Cursor) -> str:
    return f"reshaped to a size worked out in Python by {cursor.place}"


def _follow_attribute(cursor: Cursor, axis: Pieces, size: int, times: int) -> None:
    """Tries the module's attributes of this size one after the other; fixes the axis if none is it.

    The size stayed as it was in a rehearsal, so it is a number that the module keeps.
    """
    names = [
        name
        for name, number in vars(cursor.module).items()
        if type(number) is int and number == size and not name.startswith("_")
    ]
    if times <= len(names):
        cursor.bind(cursor.layer, names[times - 1], axis)
    else:
        cursor.solver.fix(axis, _hidden(cursor))


def _split(
    cursor: Cursor, axis: Pieces, sizes: Sequence[int], known: int | None
) -> tuple[int, TracedAxis]:
    """Which of the new dimensions narrows, and what it is made of.

    What a rehearsal made known decides; else the structure the axis already has, where it can;
    else a number of heads that the module knows by name, and failing that the largest dimension
    (a shuffle's other dimension is its number of groups, a pixel shuffle's its scale).
    """
    solver = cursor.solver
    for place in range(len(sizes)) if known is None else [known]:
        before, after = math.prod(sizes[:place]), math.prod(sizes[place + 1 :])
        part = solver.repeated_part(axis, before)
        is_block = part is not None and solver.size(part) == sizes[place] * after
        if part is not None and is_block and all(m % after == 0 for _, m in part):
            return place, tuple((variable, m // after) for variable, m in part)
    heads = _heads(cursor, sizes) if known is None else None
    largest = max(range(len(sizes)), key=lambda i: (sizes[i], i))
    place = known if known is not None else heads[0] if heads else largest
    before, after = math.prod(sizes[:place]), math.prod(sizes[place + 1 :])
    try:
        parts = solver.cut(axis, [sizes[place] * after] * before)
    except Unsplittable:
        cursor.fix_uneven(axis)
        return place, None
    found = solver.new(sizes[place])
    for part in parts:
        cursor.unify(part, scaled(found, after))
    if heads:
        cursor.bind(cursor.layer, heads[1], found)
    return place, found


def _heads(cursor: Cursor, sizes: Sequence[int]) -> tuple[int, str] | None:
    """A dimension, not the last, whose size the module around keeps as its number of heads."""
    for name, number in vars(cursor.module).items():
        if "head" in name and isinstance(number, int) and "dim" not in name:
            places = [i for i in range(len(sizes) - 1) if sizes[i] == number]
            if places:
                return places[-1], name
    return None
