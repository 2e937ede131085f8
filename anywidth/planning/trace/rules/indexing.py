"""How channels pass through operations that look entries up, sort them or write them somewhere.

Along the dimension of the indices all entries stay; along the others, channels pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace as Arguments
from typing import Any

import torch

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.solver import TracedAxis, Unsplittable
from anywidth.planning.trace.value import Traced


def index(cursor: Cursor, a: Arguments) -> Traced:
    indexed, rank = _indexed(cursor, a.indices)
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        return cursor.keep_whole(a, f"indexed by {cursor.place}")
    value = a.self
    if len(indexed) == 1:
        value = _without_end(cursor, value, indexed[0], a.indices[indexed[0]].numbers)
    axes = cursor.closed(value, indexed, "indexed")
    return cursor.output([*axes[: indexed[0]], *[None] * rank, *axes[indexed[-1] + 1 :]])


def _indexed(cursor: Cursor, indices: Sequence[Any]) -> tuple[list[int], int]:
    """The dimensions that are indexed, and how many the result has in their place.

    A mask stands for as many dimensions as it has, and gives one.
    """
    cursor.fix(indices, "is used as an index")
    given: Any = cursor.node.args[1]
    dims: list[int] = []
    rank, place = 0, 0
    for node, tensor in zip(given, indices, strict=True):
        count = 1
        if tensor is not None:
            is_mask = node.meta["val"].dtype in (torch.bool, torch.uint8)
            count = len(tensor.shape) if is_mask else 1
            dims += range(place, place + count)
            rank = max(rank, 1 if is_mask else len(tensor.shape))
        place += count
    return dims, rank


def _without_end(cursor: Cursor, value: Traced, dim: int, numbers: Sequence[int]) -> Traced:
    """Entries counted from the end are the same at every width, if the last ones never go."""
    if not numbers or max(numbers) >= 0 or value.axes[dim] is None:
        return value
    size = value.shape[dim]
    try:
        _, end = cursor.solver.cut(value.axes[dim], [size + min(numbers), -min(numbers)])
    except Unsplittable:
        return value
    cursor.solver.fix(end, f"indexed by {cursor.place}")
    return replace(value, axes=(*value.axes[:dim], None, *value.axes[dim + 1 :]))


def index_select(cursor: Cursor, a: Arguments) -> Traced:
    cursor.fix(a.index, "is used as an index")
    return cursor.output(cursor.closed(a.self, [a.dim], "indexed"))


def gather(cursor: Cursor, a: Arguments) -> Traced:
    """An index for each entry of the result."""
    if getattr(a, "dim", None) is None:
        return cursor.keep_whole(a, f"indexed by {cursor.place}")
    dim, index = a.dim % max(1, len(a.self.shape)), getattr(a, "index", None) or a.indices
    return cursor.output(_beside(cursor, a.self, dim, index))


def scatter(cursor: Cursor, a: Arguments) -> Traced:
    """A place for each entry of what is written."""
    dim = a.dim % max(1, len(a.self.shape))
    written = getattr(a, "src", None)
    given = [v for v in (a.index, written) if isinstance(v, Traced)]
    return cursor.output(_beside(cursor, a.self, dim, *given))


def _beside(cursor: Cursor, value: Traced, dim: int, *others: Traced) -> list[TracedAxis]:
    """The axes of a tensor whose entries go with those of others, but along one dimension."""
    axes = cursor.closed(value, [dim], "indexed")
    for other in others:
        cursor.closed(other, [dim], "indexed")
        for i in range(len(axes)):
            if i == dim:
                continue
            if other.shape[i] == value.shape[i]:
                cursor.unify(axes[i], other.axes[i])
            else:  # the first entries of the longer one
                for axis in (axes[i], other.axes[i]):
                    cursor.solver.fix(axis, f"indexed in part by {cursor.place}")
                axes[i] = None
    return axes


def index_add(cursor: Cursor, a: Arguments) -> Traced:
    """Whole rows written along one dimension, or one number into them."""
    cursor.fix(a.index, "is used as an index")
    source = next((v for v in (getattr(a, n, None) for n in ("source", "value")) if v), None)
    if not isinstance(source, Traced) or not source.shape:
        return cursor.output(cursor.closed(a.self, [a.dim], "indexed"))
    dim = a.dim % len(a.self.shape)
    return cursor.output(_beside(cursor, a.self, dim, source))


def index_put(cursor: Cursor, a: Arguments) -> Traced:
    indexed, rank = _indexed(cursor, a.indices)
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        return cursor.keep_whole(a, f"indexed by {cursor.place}")
    axes = cursor.closed(a.self, indexed, "indexed")
    behind = len(a.self.shape) - indexed[-1] - 1
    for position in range(behind + 1, min(behind + rank, len(a.values.shape)) + 1):
        cursor.solver.fix(a.values.axes[-position], f"written in part by {cursor.place}")
    place = Traced(
        (*a.self.shape[: indexed[0]], *[1] * rank, *a.self.shape[indexed[-1] + 1 :]),
        (*axes[: indexed[0]], *[None] * rank, *axes[indexed[-1] + 1 :]),
    )
    cursor.broadcast([place, a.values], place.shape)
    return cursor.output(axes)


def ordered(cursor: Cursor, a: Arguments) -> Any:
    """Entries in another order, the largest of them, or which these are."""
    dims = range(len(a.self.shape)) if a.dim is None else [a.dim]
    axes = cursor.closed(a.self, dims, "put in order")
    if cursor.op in ("argmax", "argmin", "kthvalue", "mode") and not a.keepdim:
        axes = [] if a.dim is None else [x for i, x in enumerate(axes) if i != a.dim % len(axes)]
    return cursor.outputs(axes)


def one_hot(cursor: Cursor, a: Arguments) -> Traced:
    return cursor.keep_whole(a, "is used as an index")


def regions(cursor: Cursor, a: Arguments) -> Any:
    """Boxes cut out of pictures, each pooled to one size."""
    cursor.fix(a.rois, f"boxes of {cursor.place}")
    return cursor.outputs([None, cursor.closed(a.input, [0, 2, 3], "cut out")[1], None, None])
