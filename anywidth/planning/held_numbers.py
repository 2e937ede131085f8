"""The numbers that a module keeps: attributes of its own, and of the configuration that it holds.

`self.config.num_attention_heads` is named `config.num_attention_heads`. Modules share one
configuration, but each may need another number at a narrow width. Therefore a module whose number
changes gets a copy of the configuration for itself.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

_NO_CONFIGURATION = (nn.Module, torch.Tensor, torch.Generator, type)


def held_numbers(module: nn.Module) -> dict[str, int]:
    """Numbers by name: the module's own, then those of configurations that its code reads."""
    return {name: value for name, value in _held(module).items() if type(value) is int}


def held_lists(module: nn.Module) -> dict[str, Sequence[int]]:
    """Lists and tuples of numbers by name, of the module and of its configurations."""
    return {
        name: value
        for name, value in _held(module).items()
        if isinstance(value, list | tuple) and all(type(number) is int for number in value)
    }


def _held(module: nn.Module) -> dict[str, Any]:
    own = {n: v for n, v in vars(module).items() if not n.startswith("_")}
    configurations = {n: vars(v) for n, v in own.items() if _is_configuration(v)}
    if not configurations:
        return own
    kind: Any = type(module)
    read = _names_in_code(kind)
    return own | {
        f"{name}.{key}": value
        for name, inside in configurations.items()
        if name in read
        for key, value in inside.items()
        if key in read
    }


def held_number(module: nn.Module | None, name: str) -> Any:
    """An attribute of a module, or of a configuration that it holds; None if there is none."""
    holder, _, key = name.rpartition(".")
    return getattr(getattr(module, holder, None) if holder else module, key, None)


def is_feature_count(name: str) -> bool:
    """Whether a number is by its name how many features there are, which heads keep."""
    return "dim" in name or "size" in name


def is_number_of_heads(name: str) -> bool:
    return "head" in name and not is_feature_count(name)


def is_size_of_head(name: str) -> bool:
    return "head" in name and is_feature_count(name)


def mentions(module: nn.Module, name: str) -> bool:
    """Whether the code of a module that is none of torch's has a name in it."""
    kind: Any = type(module)
    return name in _names_in_code(kind)


def set_number(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a module; a configuration that it holds is replaced by a copy."""
    holder, _, key = name.rpartition(".")
    if holder:
        vars(module)[holder] = with_numbers(vars(module)[holder], {key: value})
    else:
        vars(module)[key] = value


def with_entry(numbers: Sequence[int], place: int, number: int) -> Sequence[int]:
    """A list or tuple with another number in one place."""
    kind = list if isinstance(numbers, list) else tuple
    return kind(number if i == place else other for i, other in enumerate(numbers))


def with_numbers(configuration: Any, numbers: Mapping[str, Any]) -> Any:
    """A copy of a configuration with other numbers."""
    other = copy.copy(configuration)
    vars(other).update(numbers)
    return other


def _is_configuration(value: Any) -> bool:
    is_plain = hasattr(value, "__dict__") and not callable(value)
    return is_plain and not isinstance(value, _NO_CONFIGURATION)


def functions_of(kind: Any) -> list[FunctionType]:
    """The functions of a class, but torch's own, that run after a module is made."""
    functions = [
        inspect.unwrap(value)
        for base in kind.__mro__
        if base.__module__.partition(".")[0] != "torch" and base is not object
        for name, value in vars(base).items()
        if callable(value) and name != "__init__"
    ]
    return [function for function in functions if inspect.isfunction(function)]


@functools.lru_cache(maxsize=1024)
def _names_in_code(kind: Any) -> set[str]:
    """The names in the code of a class that runs after a module is made."""
    codes = [function.__code__ for function in functions_of(kind)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [inner for inner in code.co_consts if inspect.iscode(inner)]
    return names
