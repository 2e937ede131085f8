"""A tensor of the exported graph, and what its axes are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anywidth.planning.trace.solver import TracedAxis

# Stands for a size without an upper limit; no real size equals it.
UNKNOWN = 1_000_003


@dataclass(frozen=True)
class Traced:
    """A tensor of the exported graph: its full shape, and what each of its axes is made of.

    If it is a parameter or buffer, `name` is its name; under weight norm, that of the magnitude,
    which scales the whole tensor. `source` is the name of the parameter or buffer that it is, or
    of which it is a view. `numbers` are the entries of a list that the code writes out as indices.
    """

    shape: tuple[int, ...]
    axes: tuple[TracedAxis, ...]
    name: str | None = None
    source: str | None = None
    numbers: tuple[int, ...] = ()

    def leading(self, last: int) -> Traced:
        """All dimensions but so many at the end."""
        return Traced(self.shape[:-last], self.axes[:-last])


def shape_of(value: Any) -> tuple[int, ...]:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"not a tensor in the exported graph: {type(value)}")
    return tuple(size_of(n) for n in value.shape)


def size_of(size: int | torch.SymInt) -> int:
    """A size; if it depends on values (the number of nonzero entries), its largest value."""
    if isinstance(size, int):
        return size
    node: Any = size.node
    symbols = sorted(node.expr.free_symbols, key=str)
    ranges = node.shape_env.var_to_range
    most = [ranges[s].upper if s in ranges else UNKNOWN for s in symbols]
    known = {s: int(n) if n <= UNKNOWN else UNKNOWN for s, n in zip(symbols, most, strict=True)}
    return int(node.expr.subs(known))


def as_constant(meta: Any) -> Any:
    """The results of an operation, with no axis that narrows."""
    if isinstance(meta, torch.Tensor):
        return Traced(shape_of(meta), (None,) * meta.dim())
    if isinstance(meta, list | tuple):
        return [as_constant(item) for item in meta]
    return meta
