"""What is known of a tensor of the exported graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anywidth.planning.trace.solver import TracedAxis


@dataclass(frozen=True)
class Traced:
    """A tensor of the exported graph: its full shape, and what each of its axes is made of.

    `name` is that of the parameter or buffer that it is; under weight norm, of its magnitude,
    which scales it as a whole. `source` is that of the one that it is, or is a view of.
    """

    shape: tuple[int, ...]
    axes: tuple[TracedAxis, ...]
    name: str | None = None
    source: str | None = None


def shape_of(value: Any) -> tuple[int, ...]:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"not a tensor in the exported graph: {type(value)}")
    return tuple(int(n) for n in value.shape)


def as_constant(meta: Any) -> Any:
    """The tensors that an operation gives, with no axis that narrows."""
    if isinstance(meta, torch.Tensor):
        return Traced(shape_of(meta), (None,) * meta.dim())
    if isinstance(meta, list | tuple):
        return [as_constant(item) for item in meta]
    return meta
