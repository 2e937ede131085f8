"""Tables that are not learned, such as the place of each patch: their columns differ in meaning.

A table of places, cut to its first columns, would keep one coordinate and lose the other, and
training could not restore it. Therefore each part of a table narrows. Its numbers show the parts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from anywidth.planning.cuts import held_tensor
from anywidth.planning.trace.exported_graphs import Exports
from anywidth.planning.trace.nodes import op_name
from anywidth.planning.trace.rules.table import PRODUCTS
from anywidth.planning.trace.solver import Unsplittable
from anywidth.planning.trace.trace_findings import Findings
from anywidth.planning.trace.written_buffers import updated_buffers

# Operations that take rows out of a table.
LOOKUPS = ("embedding", "index_select", "index", "gather")
MOST_PARTS = 8
# The number of places of a table that are compared.
MOST_PLACES = 1024
TOLERANCE = 1e-4


def meets_channels(node: Node, batched: set[Node]) -> bool:
    """Whether a parameter or buffer is combined with activations, but not as a weight."""
    seen, left = set[Node](), [node]
    while left:
        passed = left.pop()
        seen.add(passed)
        for user in passed.users:
            name = op_name(user.target)
            if name in PRODUCTS or user.op != "call_function":
                continue
            if user in batched and name not in LOOKUPS:
                return True
            if user not in seen:
                left.append(user)
    return False


@torch.no_grad()
def keep_tables(found: Findings, exports: Exports) -> None:
    """Let each part of a fixed table narrow, or fix the channels that it meets."""
    frozen = {name for name, p in exports.model.named_parameters() if not p.requires_grad}
    rows: list[tuple[str, int, int | None]] = []
    tables: list[tuple[str, int, int | None]] = []
    for name in sorted(found.joining & (found.buffers | frozen)):
        held = held_tensor(exports.model, name)
        assert held is not None
        for dim, axis in enumerate(found.tensors[name].axes):
            if not found.solver.is_open(axis):
                continue
            if sum(n > 1 for n in held.shape) > 1:
                tables.append((name, dim, _parts(held, dim)))
            elif (parts := _stretches(held.flatten())) is not None:
                rows.append((name, dim, parts))
    updated = updated_buffers(exports) if rows or tables else set()
    for name, dim, parts in rows:
        if name not in updated | frozen:
            _narrow_parts(found, name, dim, parts)
    for name, dim, parts in tables:
        # A table that training writes, or that was learned elsewhere, counts as learned.
        if parts is not None or name not in updated | frozen:
            _narrow_parts(found, name, dim, parts)


def _narrow_parts(found: Findings, name: str, dim: int, parts: int | None) -> None:
    solver, size, axis = found.solver, found.tensors[name].shape[dim], found.tensors[name].axes[dim]
    try:
        cuts = solver.cut(axis, [size // parts] * parts) if parts else []
    except Unsplittable:
        cuts = []
    if not cuts:
        solver.fix(axis, f"joined by the fixed table {name}, whose parts cannot be told")
    for part in cuts[1:]:
        solver.unify(cuts[0], part, "", f"cut inside a unit by the fixed table {name}")
    if len(cuts) > 1:
        found.notes.append(f"{name} is a fixed table of {parts} parts, and each narrows")


def _parts(table: Tensor, dim: int) -> int | None:
    """The number of equal parts along a dimension; None if it cannot be seen."""
    if table.is_meta or not table.is_floating_point():
        return None
    columns = table.movedim(dim, 0).flatten(1)[:, :MOST_PLACES].float()
    columns = columns[:, columns.any(0)]  # without the place that padding has
    if columns.shape[1] == 0:
        return None
    if torch.equal(columns, columns[:1].expand_as(columns)):
        return 1
    ranks = [torch.unique((c / TOLERANCE).round(), return_inverse=True)[1] for c in columns]
    for parts in range(1, MOST_PARTS + 1):
        if len(columns) % parts:
            continue
        size = len(columns) // parts
        if all(_of_one_coordinate(ranks[i : i + size]) for i in range(0, len(ranks), size)):
            blocks = columns.unflatten(0, (parts, size))
            if size % 2 == 0 and _are_waves(blocks[:, : size // 2], blocks[:, size // 2 :]):
                return 2 * parts
            is_seen = parts > 1 or _are_waves(blocks[:, ::2], blocks[:, 1::2])
            return parts if is_seen else None
    return None


def _stretches(row: Tensor) -> int | None:
    """The number of equal parts of a row of numbers that repeat, or that hold one number each."""
    if row.is_meta or row.is_complex() or bool((row == row[0]).all()):
        return None
    for parts in (n for n in range(2, MOST_PARTS + 1) if len(row) % n == 0 and len(row) > n):
        blocks = row.unflatten(0, (parts, -1))
        if any(torch.equal(blocks, one.expand_as(blocks)) for one in (blocks[:1], blocks[:, :1])):
            return parts
    return None


def _of_one_coordinate(ranks: list[Tensor]) -> bool:
    """Whether all columns tell the same places apart: those that differ in one coordinate."""
    finest = ranks[0]
    for other in ranks[1:]:
        apart = [int(r.max()) + 1 for r in (finest, other)]
        if len(torch.unique(finest * apart[1] + other)) > max(apart):
            return False
        finest = other if apart[1] > apart[0] else finest
    return True


def _are_waves(sines: Tensor, cosines: Tensor) -> bool:
    """Whether two blocks are the sines and cosines of the same angles."""
    if sines.shape != cosines.shape:
        return False
    return bool(((sines.square() + cosines.square() - 1).abs() < 10 * TOLERANCE).all())
