"""How channels pass through a reshape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import nn

from anywidth.planning.trace.solver import Pieces, TracedAxis, Unsplittable
from anywidth.planning.trace.value import Context, Traced

# An axis repeated more often than this by a merge is not followed any further.
MOST_PIECES = 1024
# Each takes a rehearsal; more are not worth it.
MOST_GUESSES = 4
# Reshapes that are given no sizes.
SIZED_BY_TORCH = ("flatten", "squeeze")


def reshape(context: Context, value: Traced, shape: Sequence[int]) -> Traced:
    """Matches the old dimensions with the new ones in blocks of equal size."""
    misreading = context.misreading()
    if misreading is not None and misreading.times > MOST_GUESSES:
        context.fix_all([value], _hidden(context))
    inside = shape[1:] if shape[:1] == value.shape[:1] else shape
    if context.op not in SIZED_BY_TORCH and sum(n > 1 for n in inside) > 1:
        context.guess()
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
        axes += _block(context, value, olds, {i: shape[i] for i in news})
    return context.output(axes)


def _block(
    context: Context, value: Traced, olds: Sequence[int], sizes: Mapping[int, int]
) -> list[TracedAxis]:
    """The new dimensions, given by their sizes, that some of the old ones become."""
    kept = [i for i in olds if value.shape[i] > 1]
    elastic = [i for i in kept if value.axes[i] is not None]
    result: dict[int, TracedAxis] = dict.fromkeys(sizes)
    if not elastic:
        return list(result.values())
    if len(elastic) > 1:
        for i in elastic:
            context.merged.append(value.axes[i])
            context.solver.fix(value.axes[i], f"merged with other channels by {context.place}")
        return list(result.values())
    axis = context.live(value.axes[elastic[0]])
    assert axis is not None
    outer = math.prod(value.shape[i] for i in kept if i < elastic[0])
    inner = math.prod(value.shape[i] for i in kept if i > elastic[0])
    if len(axis) * outer > MOST_PIECES:
        context.solver.fix(axis, f"repeated {outer} times by {context.place}")
        return list(result.values())
    merged: Pieces = tuple((variable, m * inner) for variable, m in axis) * outer
    wide = [i for i, size in sizes.items() if size > 1]
    misreading = context.misreading()
    if len(wide) == 1:
        result[wide[0]] = merged
        if misreading is not None and misreading.dim != wide[0]:
            _follow_attribute(context, merged, sizes[wide[0]], misreading.times)
        return list(result.values())
    if misreading is not None and (misreading.dim is None or misreading.times > 1):
        context.solver.fix(axis, _hidden(context))
        return list(result.values())
    known = wide.index(misreading.dim) if misreading and misreading.dim in wide else None
    place, found = _split(context, merged, [sizes[i] for i in wide], known)
    result[wide[place]] = found
    return list(result.values())


def _hidden(context: Context) -> str:
    return f"reshaped to a size worked out in Python by {context.place}"


def _follow_attribute(context: Context, axis: Pieces, size: int, times: int) -> None:
    """Tries the module's attributes of this size one after the other; fixes the axis if none is it.

    The size stayed as it was in a rehearsal, so it is a number that the module keeps.
    """
    module = context.model.get_submodule(context.layer)
    names = [
        name
        for name, number in vars(module).items()
        if type(number) is int and number == size and not name.startswith("_")
    ]
    if times <= len(names):
        context.bind(context.layer, names[times - 1], axis)
    else:
        context.solver.fix(axis, _hidden(context))


def _split(
    context: Context, axis: Pieces, sizes: Sequence[int], known: int | None
) -> tuple[int, TracedAxis]:
    """Which of the new dimensions narrows, and what it is made of.

    What a rehearsal made known decides; else the structure the axis already has, where it can;
    else a number of heads that the module knows by name, and failing that the largest dimension
    (a shuffle's other dimension is its number of groups, a pixel shuffle's its scale).
    """
    solver = context.solver
    for place in range(len(sizes)) if known is None else [known]:
        before, after = math.prod(sizes[:place]), math.prod(sizes[place + 1 :])
        pieces = solver.expand(axis)
        if len(pieces) % before == 0 and pieces == pieces[: len(pieces) // before] * before:
            part = pieces[: len(pieces) // before]
            if solver.size(part) == sizes[place] * after and all(m % after == 0 for _, m in part):
                return place, tuple((variable, m // after) for variable, m in part)
    heads = _heads(context, sizes) if known is None else None
    largest = max(range(len(sizes)), key=lambda i: (sizes[i], i))
    place = known if known is not None else heads[0] if heads else largest
    before, after = math.prod(sizes[:place]), math.prod(sizes[place + 1 :])
    try:
        parts = solver.cut(axis, [sizes[place] * after] * before)
    except Unsplittable:
        solver.fix(axis, context.uneven)
        return place, None
    found = solver.new(sizes[place])
    for part in parts:
        context.unify(part, tuple((variable, m * after) for variable, m in found))
    if heads:
        context.bind(*heads[1], found)
    return place, solver.expand(found)


def _heads(context: Context, sizes: Sequence[int]) -> tuple[int, tuple[str, str]] | None:
    """A dimension, not the last, whose size the module around keeps as its number of heads."""
    path = context.layer
    module: nn.Module = context.model.get_submodule(path) if path else context.model
    for name, number in vars(module).items():
        if "head" in name and isinstance(number, int) and "dim" not in name:
            places = [i for i in range(len(sizes) - 1) if sizes[i] == number]
            if places:
                return places[-1], (path, name)
    return None
