"""Dictionaries in which a module keeps tensors that it computed from its weights, by device say.

LeViT keeps the biases of its attention so while it is evaluated. They have the width with which
they were computed, so that a network of another width must compute them again.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from anywidth.planning.held_numbers import functions_of

Holder = tuple[dict[str, Any], str]
# The attributes of every module.
_OF_TORCH = frozenset(vars(nn.Module()))


def result_holders(model: nn.Module) -> list[Holder]:
    """The attributes of modules that are such dictionaries, as (attributes, name)."""
    kinds: list[tuple[nn.Module, Any]] = [(module, type(module)) for module in model.modules()]
    return [
        (vars(module), name)
        for module, kind in kinds
        for name, value in vars(module).items()
        if type(value) is dict and name not in _OF_TORCH and name in _filled_in_code(kind)
    ]


def forget_results(holders: list[Holder]) -> None:
    for attributes, name in holders:
        held = attributes.get(name)
        if held and all(isinstance(value, Tensor) for value in held.values()):
            attributes[name] = {}


@contextlib.contextmanager
def results_forgotten(model: nn.Module) -> Iterator[None]:
    """Without these tensors inside a `with` block; afterwards they are what they were."""
    before = [(*holder, holder[0][holder[1]]) for holder in result_holders(model)]
    for attributes, name, held in before:
        attributes[name] = dict(held)
    forget_results([(attributes, name) for attributes, name, _ in before])
    try:
        yield
    finally:
        for attributes, name, held in before:
            attributes[name] = held


@functools.lru_cache(maxsize=1024)
def _filled_in_code(kind: Any) -> frozenset[str]:
    """The attributes that the code of a class looks keys up in, and writes entries to."""
    return frozenset[str]().union(
        *(
            _attributes_of(function, "STORE_SUBSCR") & _attributes_of(function, "CONTAINS_OP")
            for function in functions_of(kind)
        )
    )


def _attributes_of(function: Any, operation: str) -> frozenset[str]:
    """The attributes that are named in the lines in which an operation occurs."""
    steps = [
        (step.positions.lineno if step.positions is not None else None, step.opname, step.argval)
        for step in dis.get_instructions(function)
    ]
    lines = {line for line, name, _ in steps if name == operation}
    return frozenset(held for line, name, held in steps if name == "LOAD_ATTR" and line in lines)
