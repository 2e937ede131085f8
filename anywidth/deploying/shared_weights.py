"""Find the weights of a small network that are cut, and perhaps scaled, from the full one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from anywidth.planning.cuts import held_tensor
from anywidth.planning.groups import Plan
from anywidth.slimming.state import tensor_owners
from anywidth.width import ChannelConfig

# Smaller tensors stay in the graph: a description of their source would be as large.
_FEWEST_VALUES = 256
# A folded norm is a factor per channel; dividing by it rounds.
_TOLERANCE = 2e-6


@dataclass(frozen=True)
class Source:
    """A tensor of the full network, and the part of it that a width keeps.

    `cuts` has the kept stretches of each axis as (start, length), or None if all of it is kept.
    """

    name: str
    whole: np.ndarray
    part: np.ndarray
    cuts: tuple[tuple[tuple[int, int], ...] | None, ...]


@dataclass(frozen=True)
class Match:
    """A weight: `source` cut, scaled along `axis` if there is a `scale`, and transposed."""

    source: Source
    order: tuple[int, ...]
    axis: int = 0
    scale: np.ndarray | None = None

    def to_json(self, scale_start: int) -> dict[str, Any]:
        return {
            "weight": self.source.name,
            "cuts": self.source.cuts,
            "order": self.order,
            "scale": None if self.scale is None else [self.axis, scale_start],
        }


def sources(model: nn.Module, plan: Plan, config: ChannelConfig) -> list[Source]:
    """The tensors of a converted network, as a configuration cuts them."""
    held = {name: held_tensor(owner, key) for name, owner, key in tensor_owners(model, plan)}
    found = []
    for name, tensor in held.items():
        if tensor is None or tensor.numel() < _FEWEST_VALUES:
            continue
        whole = np.ascontiguousarray(tensor.detach().cpu().numpy())
        cuts = tuple(
            None if axis is None else plan.axis_ranges(axis, config) for axis in plan.tensors[name]
        )
        found.append(Source(name, whole, _cut(whole, cuts), cuts))
    return found


def match(name: str, value: np.ndarray, candidates: Sequence[Source]) -> Match | None:
    """The source of a weight; None if there is none, or if the weight is too small to matter.

    Values decide, not names, so weights that a converter scaled or transposed are found too.
    """
    if value.size < _FEWEST_VALUES:
        return None
    for source in sorted(candidates, key=lambda one: _unlikeness(name, one.name)):
        for order in _orders(source.part.shape, value.shape):
            turned_back = value.transpose(np.argsort(order))
            if source.part.dtype != value.dtype:
                continue
            if np.array_equal(source.part, turned_back):
                return Match(source, order)
            for axis, scale in _scales(source.part, turned_back):
                return Match(source, order, axis, scale)
    return None


def _orders(shape: tuple[int, ...], wanted: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if shape == wanted:
        yield tuple(range(len(shape)))
    if len(shape) == 2 and shape[::-1] == wanted:
        yield (1, 0)


def _scales(part: np.ndarray, value: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Axes along which `value` is `part` times one factor per entry, and the factors."""
    if part.dtype != np.float32:
        return
    for axis in range(part.ndim):
        ones = np.moveaxis(part, axis, 0).reshape(part.shape[axis], -1)
        others = np.moveaxis(value, axis, 0).reshape(ones.shape)
        largest = np.abs(ones).argmax(axis=1)
        rows = np.arange(len(ones))
        divisors = ones[rows, largest].astype(np.float64)
        known = divisors != 0
        factors = np.where(known, others[rows, largest] / np.where(known, divisors, 1.0), 0.0)
        scale = factors.astype(np.float32)
        gap = np.abs(ones * scale[:, None] - others).max(axis=1)
        if np.all(gap <= _TOLERANCE * np.abs(others).max(axis=1)):
            yield axis, scale


def _cut(whole: np.ndarray, cuts: tuple[Any, ...]) -> np.ndarray:
    for axis, cut in enumerate(cuts):
        if cut is not None:
            places = np.concatenate([np.arange(start, start + length) for start, length in cut])
            whole = whole.take(places, axis)
    return whole


def _unlikeness(name: str, source: str) -> int:
    """A sort key: sources of the same name first, then sources of the same layer."""
    if name.endswith(source):
        return 0
    layer = source.rpartition(".")[0].replace(".parametrizations.weight", "")
    return 1 if layer and layer in name else 2
