"""How the weights of a width are made from those of the full width: cut, scale, transpose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anywidth_runtime.errors import BundleError
from anywidth_runtime.harmless_graphs import Placeholder

# The stretches of an axis that a width keeps, as (start, length); None keeps all of it.
Cut = tuple[tuple[int, int], ...] | None


@dataclass(frozen=True)
class Piece:
    """One weight of one graph.

    Args:
        weight: the weight of the full width.
        cuts: the part of each axis that is kept.
        scale: one factor per entry of one axis (a batch norm folded into its layer); None if there
            is none.
        scaled_axis: the axis of `scale`.
        order: the order of the axes in the graph.
    """

    weight: np.ndarray
    cuts: tuple[Cut, ...]
    scale: np.ndarray | None
    scaled_axis: int
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = _cut_sizes(self.weight.shape, self.cuts)
        return tuple(sizes[axis] for axis in self.order)

    def cut(self) -> np.ndarray:
        """The weight for the graph; a view of the file if nothing has to be changed."""
        part = self.weight
        for axis, cut in enumerate(self.cuts):
            if cut is not None:
                before = (slice(None),) * axis
                stretches = [part[(*before, slice(start, start + n))] for start, n in cut]
                part = stretches[0] if len(cut) == 1 else np.concatenate(stretches, axis)
        if self.scale is not None:
            sizes = [-1 if axis == self.scaled_axis else 1 for axis in range(part.ndim)]
            with np.errstate(all="ignore"):  # a weight may be infinite
                part = part * self.scale.reshape(sizes)
        return np.ascontiguousarray(part.transpose(self.order)).reshape(self.shape)


def read_pieces(
    text: bytes,
    placeholders: Mapping[str, Placeholder],
    weights: Mapping[str, np.ndarray],
    scales: np.ndarray,
) -> dict[str, Piece]:
    """Check the pieces of one graph against the graph and the weights in the file."""
    try:
        data = json.loads(text)
        found = {str(name): _piece(entry, weights, scales) for name, entry in data.items()}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise BundleError(f"how its weights are cut cannot be read ({str(error)[:80]})") from error
    for name in {*found, *placeholders}:
        if name not in found or name not in placeholders:
            raise BundleError(f"weight {name[:60]!r} is not in both the graph and the list of cuts")
        piece, wanted = found[name], placeholders[name]
        if piece.shape != wanted.shape or piece.weight.dtype.name != wanted.dtype:
            raise BundleError(
                f"weight {name[:60]!r} has shape {piece.shape} when cut and {wanted.shape} in the "
                "graph"
            )
    return found


def _piece(data: Any, weights: Mapping[str, np.ndarray], scales: np.ndarray) -> Piece:
    weight = weights[data["weight"]]
    cuts = tuple(_cut(cut, size) for cut, size in zip(data["cuts"], weight.shape, strict=True))
    order = tuple(data["order"])
    if sorted(order) != list(range(weight.ndim)):
        raise ValueError(f"axes in the order {order[:8]}")
    if data["scale"] is None:
        return Piece(weight, cuts, None, 0, order)
    axis, start = (_index(value) for value in data["scale"])
    length = _cut_sizes(weight.shape, cuts)[axis]
    scale = scales[start : start + length]
    if len(scale) != length or weight.dtype != np.float32:
        raise ValueError(f"a scale of {len(scale)} values for {length} of {weight.dtype}")
    return Piece(weight, cuts, scale, axis, order)


def _cut(data: Any, size: int) -> Cut:
    """Check that the stretches are in ascending order, inside the axis, and do not overlap."""
    if data is None:
        return None
    cut = tuple((_index(start), _index(length)) for start, length in data)
    ends = [0]
    for start, length in cut:
        if start < ends[-1] or length < 1:
            raise ValueError(f"stretches {cut[:8]}")
        ends.append(start + length)
    if not cut or ends[-1] > size:
        raise ValueError(f"stretches {cut[:8]} of an axis of {size}")
    return cut


def _cut_sizes(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> list[int]:
    pairs = zip(shape, cuts, strict=True)
    return [size if cut is None else sum(length for _, length in cut) for size, cut in pairs]


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} where a position was expected")
    return value
