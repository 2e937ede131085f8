"""Compare two runs of a network by the outputs of its parts, and its own given the same parts'.

A detector sorts boxes by their scores: where two networks differ by rounding alone, one may keep a
box that the other does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


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
    model: nn.Module,
    parts: Sequence[str],
    outputs: Sequence[Any],
    difference: Callable[[Any, Any], float],
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
