"""How a batch becomes the arguments of a network: by position, by name, or a single one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from anywidth.errors import AnywidthError


def arguments_by_name(model: nn.Module, batch: Any) -> bool:
    """Whether a batch is a mapping from names to arguments; otherwise it is one argument."""
    if not isinstance(batch, Mapping):
        return False
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**batch)
    except TypeError as error:
        known = [name for name in batch if name in signature.parameters]
        if known:  # so it cannot be meant as one argument
            raise _not_taken(model, signature, batch, error) from error
        return False
    return True


def required_arguments(model: nn.Module) -> list[str]:
    """The arguments that `forward` cannot be called without."""
    by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [
        one.name
        for one in inspect.signature(model.forward).parameters.values()
        if one.kind in by_position and one.default is one.empty
    ]


def positional_arguments(
    model: nn.Module, given: Any, named: Mapping[str, Any] | None = None
) -> tuple[Any, ...]:
    """All arguments by position; omitted ones have the defaults of `forward`.

    `given` is a tuple of arguments, a mapping by name, or one argument.
    """
    named = dict(named or {})
    if given is not None and not named and arguments_by_name(model, given):
        given, named = (), dict(given)
    if not isinstance(given, tuple):
        given = () if given is None else (given,)
    if not named:
        return given
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*given, **named).arguments
    except TypeError as error:
        raise _not_taken(model, signature, named, error) from error
    parameters = list(signature.parameters.values())
    for one in parameters:
        if one.kind is one.VAR_KEYWORD and one.name in bound:
            raise AnywidthError(
                f"forward() of {type(model).__name__} takes {', '.join(bound[one.name])} only in "
                f"**{one.name}, and an example is kept by position: leave it out, or plan a module "
                "whose forward calls this one with it"
            )
        if one.kind is one.KEYWORD_ONLY and one.name in bound:
            raise AnywidthError(
                f"forward() of {type(model).__name__} takes {one.name!r} by name only, and an "
                "example is kept by position: write it without the star, forward(self, "
                f"{one.name}, ...), or plan a module with such a forward that calls this one"
            )
    last = max(i for i, one in enumerate(parameters) if one.name in bound)
    values: list[Any] = []
    for one in parameters[: last + 1]:
        value = bound.get(one.name, () if one.kind is one.VAR_POSITIONAL else one.default)
        values += value if one.kind is one.VAR_POSITIONAL else (value,)
    return tuple(values)


def _not_taken(
    model: nn.Module, signature: inspect.Signature, named: Mapping[Any, Any], error: TypeError
) -> AnywidthError:
    return AnywidthError(
        f"forward{signature} of {type(model).__name__} cannot be called with {list(named)}: "
        f"{error}. Leave out what it does not take, such as labels"
    )
