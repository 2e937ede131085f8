"""The error class of this library, and how messages are made."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


class AnywidthError(ValueError):
    """Raised for every value that this library cannot use.

    The message names the value given, what was expected, and the fix.
    """


@contextlib.contextmanager
def errors_about(place: object, fix: str = "") -> Iterator[None]:
    """Errors of the block begin with the file or option they are about, and end with the fix."""
    try:
        yield
    except AnywidthError as error:
        raise AnywidthError(f"{place}: {error}{fix and '; '}{fix}") from error


@contextlib.contextmanager
def packages_for(use: str, install: str) -> Iterator[None]:
    """A package that is missing in the block is named, with what needs it and what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise AnywidthError(
            f"{use} needs the package {error.name!r}; install it with: pip install {install}"
        ) from error


_MOST_NAMES = 5


def few_of(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + rest


def did_you_mean(
    name: str, names: Iterable[str], most: int = 3, form: str = " (did you mean {}?)"
) -> str:
    """The closest of some names, in a question; "" if none is close."""
    close = difflib.get_close_matches(name, list(names), n=most)
    return form.format(" or ".join(close)) if close else ""


def misfits(given: Mapping[str, Any], held: Mapping[str, Any]) -> str:
    """How named tensors differ from those of a network, in words; "" if they fit."""
    both = [name for name in held if name in given]
    found = {
        "lacking": [name for name in held if name not in given],
        "unknown": [name for name in given if name not in held],
        "of another shape": [
            f"{name} {tuple(given[name].shape)} instead of {tuple(held[name].shape)}"
            for name in both
            if given[name].shape != held[name].shape
        ],
    }
    return "; ".join(f"{what}: {few_of(names)}" for what, names in found.items() if names)
