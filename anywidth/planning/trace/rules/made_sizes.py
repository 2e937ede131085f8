"""Tensors whose sizes Python worked out: zeros to begin with, and tensors spread over new axes.

The graph shows numbers. One of them may be a number of channels, and then narrows with them: which
ones is seen by what they meet, and a rehearsal tells whether it is so.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace as Arguments

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.solver import TracedAxis
from anywidth.planning.trace.trace_findings import Follower
from anywidth.planning.trace.value import Traced


def constant(cursor: Cursor, a: Arguments) -> Traced:
    """Numbers in a row, or random ones: those of a narrower network would be others."""
    return cursor.output([None] * len(cursor.shape))


def filled(cursor: Cursor, a: Arguments) -> Traced:
    """A new tensor of one number: at another width it is what it is now."""
    axes: list[TracedAxis] = [None] * len(cursor.shape)
    _size(cursor, axes, range(len(axes)))
    return cursor.output(axes)


def expand(cursor: Cursor, a: Arguments) -> Traced:
    shape = cursor.shape
    axes = cursor.broadcast([a.self, getattr(a, "other", None)], shape)
    if not isinstance(getattr(a, "other", None), Traced):
        old = (1,) * (len(shape) - len(a.self.shape)) + a.self.shape
        for dim, axis in enumerate(axes):
            if axis is not None and cursor.follow_source(dim, axis):
                cursor.guess()
        _size(cursor, axes, [i for i, size in enumerate(shape) if old[i] == 1 < size])
    return cursor.output(axes)


def _size(cursor: Cursor, axes: list[TracedAxis], dims: Sequence[int]) -> None:
    """Has new dimensions follow channels, if they have the size of any."""
    given = [dim for dim in dims if cursor.shape[dim] > 1 and cursor.source(dim) is not None]
    batch, last = cursor.found.known.batch, len(axes) - 1
    dims = [dim for dim in dims if cursor.shape[dim] != batch or dim == last]
    if given and cursor.misreading is None and not cursor.failures:
        cursor.guess()
        for shown in given:
            axes[shown] = cursor.found.fresh_axis(cursor.shape[shown])
            cursor.follow_source(shown, axes[shown])
        other = _channels(cursor, [dim for dim in dims if dim not in given])
        if other is not None:
            axes[other] = cursor.found.fresh_axis(cursor.shape[other])
        return
    known = _followed(cursor, axes, dims)
    dim = _channels(cursor, [i for i in dims if i not in known])
    names: list[str | None] = [None, *cursor.sized_by(cursor.shape[dim])] if dim is not None else []
    if len(names) > 1:
        cursor.found.sized.add(cursor.node)
    # An attribute that other operations follow has this size, and another may have it too.
    place = next(iter(known)) if known and dim is None else None
    if place is not None:
        here = [f for f in cursor.found.followers if f.path == cursor.layer]
        sure = {f.attribute for f in here if not f.is_tried}
        names = [None, *(n for n in cursor.sized_by(cursor.shape[place]) if n not in sure)]
    guesses = names or ([None] if known else [])
    times = cursor.misreading.times if cursor.misreading else cursor.failures
    if times >= len(guesses):
        return
    name = guesses[times] if cursor.misreading else cursor.next_guess(guesses)
    cursor.guess()
    for followed_dim, axis in known.items():
        axes[followed_dim] = axis
    if dim is not None:
        axes[dim] = cursor.found.fresh_axis(cursor.shape[dim])
    sized = place if dim is None else dim
    if sized is not None and name is not None:
        cursor.bind(Follower(cursor.layer, name, axes[sized] or (), is_tried=True))


def _followed(
    cursor: Cursor, others: Sequence[TracedAxis], dims: Sequence[int]
) -> dict[int, TracedAxis]:
    """The dimensions whose size an attribute of the module around is known to follow.

    Not one that the tensor has already: what is repeated then is something else.
    """
    solver = cursor.solver
    taken = solver.variables(others)
    found: dict[int, TracedAxis] = {}
    for follower in cursor.found.followers:
        if follower.path == cursor.layer and taken.isdisjoint(solver.variables([follower.axis])):
            size = solver.size(follower.axis)
            places = [dim for dim in dims if cursor.shape[dim] == size and dim not in found]
            if places:
                found[places[-1]] = follower.axis
    return found


def _channels(cursor: Cursor, dims: Sequence[int]) -> int | None:
    """The dimension that may be channels; of several, the largest."""
    shape = cursor.shape
    held = cursor.found.tensors.items()
    sizes = {n for name, v in held if name not in cursor.found.buffers for n in v.shape if n > 1}
    # What one dimension is spread over may be heads of all examples.
    is_spread = len(dims) == 1 < len(shape)
    places = [dim for dim in dims if shape[dim] in sizes or is_spread]
    return max(places, key=lambda i: (shape[i], i), default=None)
