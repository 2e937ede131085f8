"""Compare two runs of a network by the outputs of its parts, and its own given the same parts'.

A detector sorts boxes by their scores: where two networks differ by rounding alone, one may keep a
box that the other does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from anywidth.planning.model_outputs import output_leaves


@contextlib.contextmanager
def kept_outputs(model: nn.Module, parts: Sequence[str]) -> Iterator[list[Any]]:
    """What parts of a network return inside a `with` block, in the order of their calls."""
    outputs: list[Any] = []

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        outputs.append(_copied(output))

    with _hooked(model, parts, keep):
        yield outputs


@contextlib.contextmanager
def given_outputs(
    model: nn.Module, parts: Sequence[str], outputs: Sequence[Any]
) -> Iterator[list[float]]:
    """Parts of a network return these outputs inside a `with` block.

    Yields the differences to what they computed, infinite if they are called more or less often.
    """
    gaps: list[float] = []

    def give(module: nn.Module, given: Any, output: Any) -> Any:
        if len(gaps) >= len(outputs):
            gaps.append(float("inf"))
            return output
        other = outputs[len(gaps)]
        gaps.append(difference(other, output))
        return _copied(other)

    with _hooked(model, parts, give):
        yield gaps
    if len(gaps) < len(outputs):
        gaps.append(float("inf"))


def _hooked(
    model: nn.Module, parts: Sequence[str], hook: Callable[..., Any]
) -> contextlib.ExitStack:
    handles = contextlib.ExitStack()
    for part in parts:
        handles.enter_context(model.get_submodule(part).register_forward_hook(hook))
    return handles


_copied = partial(tree_map_only, Tensor, Tensor.clone)


def difference(first: Any, second: Any) -> float:
    """The largest gap between two outputs, relative to the largest value; NaN equals NaN."""
    leaves = output_leaves(first), output_leaves(second)
    if len(leaves[0]) != len(leaves[1]):
        return float("inf")
    return max((_gap(one, other) for one, other in zip(*leaves, strict=True)), default=0.0)


def _gap(one: Any, other: Any) -> float:
    if not isinstance(one, Tensor):
        return 0.0 if one == other else float("inf")
    if one.shape != other.shape:
        return float("inf")
    if one.is_meta:
        return 0.0  # there are no values
    if one.is_complex() and other.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    if one.numel() == 0:
        return 0.0
    scale = max(1.0, float(one.nan_to_num().abs().max()))
    equal = (one.isnan() & other.isnan()) | (one == other)
    return float(torch.where(equal, 0.0, (one - other).abs()).max()) / scale
