"""How channels pass through a reshape."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from anywidth.trace.solver import Pieces, TracedAxis, Unsplittable
from anywidth.trace.value import Context, Traced

# An axis repeated more often than this by a merge is not followed any further.
MOST_PIECES = 1024


def reshape(context: Context, value: Traced, shape: Sequence[int]) -> Traced:
    """Matches the old dimensions with the new ones in blocks of equal size."""
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
        axes += _block(context, value, olds, [shape[i] for i in news])
    return context.output(axes)


def _block(
    context: Context, value: Traced, olds: Sequence[int], sizes: Sequence[int]
) -> list[TracedAxis]:
    kept = [i for i in olds if value.shape[i] > 1]
    elastic = [i for i in kept if value.axes[i] is not None]
    if not elastic:
        return [None] * len(sizes)
    if len(elastic) > 1:
        for i in elastic:
            context.solver.fix(value.axes[i], f"merged with other channels by {context.reason}")
        return [None] * len(sizes)
    axis = context.live(value.axes[elastic[0]])
    assert axis is not None
    outer = math.prod(value.shape[i] for i in kept if i < elastic[0])
    inner = math.prod(value.shape[i] for i in kept if i > elastic[0])
    if len(axis) * outer > MOST_PIECES:
        context.solver.fix(axis, f"repeated {outer} times by {context.op} of {context.layer}")
        return [None] * len(sizes)
    merged: Pieces = tuple((variable, m * inner) for variable, m in axis) * outer
    wide = [i for i, size in enumerate(sizes) if size > 1]
    result: list[TracedAxis] = [None] * len(sizes)
    if len(wide) == 1:
        result[wide[0]] = merged
        return result
    place, found = _split(context, merged, [sizes[i] for i in wide])
    result[wide[place]] = found
    return result


def _split(context: Context, axis: Pieces, sizes: Sequence[int]) -> tuple[int, TracedAxis]:
    """Which of the new dimensions narrows, and what it is made of.

    The structure the axis already has decides where it can; otherwise a number of heads that
    the module knows by name, and failing that the largest dimension (a shuffle's other
    dimension is its number of groups, a pixel shuffle's its scale).
    """
    solver = context.solver
    for place in range(len(sizes)):
        before, after = math.prod(sizes[:place]), math.prod(sizes[place + 1 :])
        pieces = solver.expand(axis)
        if len(pieces) % before == 0 and pieces == pieces[: len(pieces) // before] * before:
            part = pieces[: len(pieces) // before]
            if solver.size(part) == sizes[place] * after and all(m % after == 0 for _, m in part):
                return place, tuple((variable, m // after) for variable, m in part)
    heads = _heads(context, sizes)
    place = heads[0] if heads else max(range(len(sizes)), key=lambda i: (sizes[i], i))
    before, after = math.prod(sizes[:place]), math.prod(sizes[place + 1 :])
    try:
        parts = solver.cut(axis, [sizes[place] * after] * before)
    except Unsplittable:
        solver.fix(axis, f"cut inside a unit by {context.op} of {context.layer}")
        return place, None
    found = solver.new(sizes[place])
    for part in parts:
        context.unify(part, tuple((variable, m * after) for variable, m in found))
    if heads:
        context.attributes.append((*heads[1], found, None))
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
