"""Read JSON data by a schema: a value of another type is an error that names its place.

A schema is a reader: a function that takes a value and its place, and returns the checked value.
No package is used for this, because the library only needs torch.

    GROUP = record({"name": text, "channels": whole(1), "fixed": optional(text)})
    found = listed(GROUP)(data["groups"], "groups")
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from anywidth.errors import AnywidthError

T = TypeVar("T")
Reader = Callable[[Any, str], T]

# A longer value, perhaps a whole file, is shortened to its ends.
_MOST_SHOWN = 60


def anything(value: Any, at: str) -> Any:
    return value


def text(value: Any, at: str) -> str:
    return value if isinstance(value, str) else refuse(at, value, "text")


def flag(value: Any, at: str) -> bool:
    return value if isinstance(value, bool) else refuse(at, value, "true or false")


def whole(least: int, most: int | None = None) -> Reader[int]:
    """A whole number from `least` to `most`."""

    def read(value: Any, at: str) -> int:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < least or (most is not None and value > most):
            limit = f"of at least {least}" if most is None else f"from {least} to {most}"
            refuse(at, value, f"a whole number {limit}")
        return int(value)

    return read


def number(value: Any, at: str) -> float:
    """A finite number."""
    found = any_number(value, at)
    return found if math.isfinite(found) else refuse(at, value, "a finite number")


def any_number(value: Any, at: str) -> float:
    """A number, NaN or infinity."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(at, value, "a number")
    try:
        return float(value)
    except OverflowError:
        refuse(at, value, "a number that fits 64 bits")


def optional(reader: Reader[T]) -> Reader[T | None]:
    return lambda value, at: None if value is None else reader(value, at)


def listed(reader: Reader[T]) -> Reader[list[T]]:
    """A list of values of one kind."""

    def read(value: Any, at: str) -> list[T]:
        return [reader(item, f"{at}[{i}]") for i, item in enumerate(_list(value, at))]

    return read


def row(*readers: Reader[Any]) -> Reader[tuple[Any, ...]]:
    """A list with one value per kind."""

    def read(value: Any, at: str) -> tuple[Any, ...]:
        if len(_list(value, at)) != len(readers):
            refuse(at, value, f"a list of {len(readers)}")
        pairs = enumerate(zip(readers, value, strict=True))
        return tuple(reader(item, f"{at}[{i}]") for i, (reader, item) in pairs)

    return read


def mapped(reader: Reader[T]) -> Reader[dict[str, T]]:
    """An object with any names, and values of one kind."""

    def read(value: Any, at: str) -> dict[str, T]:
        return {name: reader(item, f"{at}.{name}") for name, item in _object(value, at).items()}

    return read


def record(
    readers: Mapping[str, Reader[Any]], defaults: Mapping[str, Any] | None = None
) -> Reader[dict[str, Any]]:
    """An object with these names and no other; a name with a default may be missing."""
    known = dict(defaults or {})

    def read(value: Any, at: str) -> dict[str, Any]:
        given = {**known, **_object(value, at)}
        dot = f"{at}." if at else ""
        for name in given:
            if name not in readers:
                raise AnywidthError(f"{dot}{_short(name)}: unknown; expected {', '.join(readers)}")
        for name in readers:
            if name not in given:
                raise AnywidthError(f"{dot}{name}: missing")
        return {name: reader(given[name], f"{dot}{name}") for name, reader in readers.items()}

    return read


def refuse(at: str, value: Any, expected: str) -> NoReturn:
    """Raise the error for a value of another kind."""
    raise AnywidthError(f"{at}: expected {expected}, found {_short(value)}")


def checksum_of(data: Mapping[str, Any]) -> str:
    """The checksum of JSON data after reading it back, because JSON turns keys into text."""
    try:
        written = json.dumps(json.loads(json.dumps(data)), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise AnywidthError(
            f"the state to save is not JSON data ({error}); expected numbers, text, None, lists "
            "and dicts; use flatten_state for tensors"
        ) from error
    return hashlib.sha256(written.encode()).hexdigest()


def _list(value: Any, at: str) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, list | tuple) else refuse(at, value, "a list")


def _object(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        refuse(at or "the data", value, "an object of named values")
    return value


def _short(value: Any) -> str:
    shown = reprlib.repr(value)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"


def check_encodable(value: str, what: str) -> None:
    """Refuse the name of a file that no JSON, page or log can hold: its bytes are no text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise AnywidthError(
            f"{what} {value!a}: its name has bytes that are not UTF-8; rename it"
        ) from None
