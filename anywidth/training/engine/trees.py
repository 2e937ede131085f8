"""Batches and outputs that are tensors, or tuples, lists, dictionaries and dataclasses of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

from anywidth.planning.call_arguments import arguments_by_name


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a network on a batch; a tuple is its positional arguments, as in `anywidth.plan`.

    A mapping is its arguments by name, unless the network takes one argument with another name.
    """
    if isinstance(inputs, tuple):
        return model(*inputs)
    if arguments_by_name(model, inputs):
        return model(**inputs)
    return model(inputs)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a tree of tuples, lists, dictionaries and dataclasses, in order."""
    if _is_dataclass(tree):
        tree = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same tree with `function` applied to each tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, item) for item in tree)
    if isinstance(tree, MutableMapping):
        same = copy.copy(tree)  # keeps the attributes of a dictionary's subclass
        for key, item in tree.items():
            same[key] = map_tensors(function, item)
        return same
    if _is_dataclass(tree):
        same = copy.copy(tree)
        for field in dataclasses.fields(tree):
            part = map_tensors(function, getattr(tree, field.name))
            object.__setattr__(same, field.name, part)  # also if it is frozen
        return same
    return tree


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def signature(tree: Any) -> list[Any]:
    """Equal for two trees if one can be copied into the other."""
    return [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves(tree)]


def copy_into(target: Any, source: Any) -> None:
    """Copy every tensor of a tree into another tree, without waiting."""
    for to, value in zip(leaves(target), leaves(source), strict=True):
        if isinstance(to, Tensor):
            to.copy_(value, non_blocking=True)
