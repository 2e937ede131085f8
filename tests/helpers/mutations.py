"""Damage to files: values of other types, bytes that are changed or cut off."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from anywidth.errors import AnywidthError

Found = TypeVar("Found")

# What a reader may not expect at a place: other types, numbers out of range, other containers.
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 1.5, -0.25, 10**20, 10**400, float("nan"), float("inf"), "", "x",
    "a.b:c", "\0", "../..", "é" * 300, [], {}, [None], [[]], {"a": 1}, ["x", 2], [1, 2, 3, 4, 5, 6],
)  # fmt: skip


def places(data: Any) -> list[tuple[Any, ...]]:
    """The path of every value inside JSON data."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(data, dict):
        inside = list(data.items())
    elif isinstance(data, list):
        inside = list(enumerate(data))
    deeper = [(key, *rest) for key, value in inside for rest in places(value)]
    return [*((key,) for key, _ in inside), *deeper]


def mutated(data: Any, chance: random.Random, count: int) -> Iterator[tuple[str, Any]]:
    """`count` copies of JSON data with one change each, and what that is."""
    # Rare places, such as the fields of one record in a long list, come as often as common ones.
    kinds: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for place in places(data):
        kinds.setdefault(tuple("" if isinstance(k, int) else k for k in place), []).append(place)
    for _ in range(count):
        place = chance.choice(kinds[chance.choice(list(kinds))])
        changed = copy.deepcopy(data)
        parent = changed
        for key in place[:-1]:
            parent = parent[key]
        done = chance.choice(_CHANGES)(parent, place[-1], chance)
        if changed != data:
            yield f"{place}: {done}", changed


def damaged(data: bytes, chance: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """`count` copies of bytes: one changed, cut off, cut out, repeated, or replaced by noise."""
    for _ in range(count):
        start = chance.randrange(len(data))
        end = min(len(data), start + chance.choice((1, 1, 4, 64, len(data))))
        noise = chance.randbytes(end - start)
        replacement = chance.choice((noise, noise, b"", data[start:end] * 2, b"\0" * len(noise)))
        changed = data[:start] + replacement + data[end:]
        if changed != data:
            yield f"bytes {start} to {end}", changed


def refusal(act: Callable[..., Found], *given: Any) -> tuple[str | None, Found | None]:
    """What is refused with, in one short line, or what comes out; any other error is a failure."""
    try:
        return None, act(*given)
    except AnywidthError as error:
        message = str(error)
    assert "\n" not in message, message
    assert len(message) < 1000, message
    return message, None


def _replace(parent: Any, key: Any, chance: random.Random) -> str:
    parent[key] = copy.deepcopy(chance.choice(STRANGE))
    return f"{parent[key]!r}"


def _nudge(parent: Any, key: Any, chance: random.Random) -> str:
    """Another value of the same type, which a check of types lets through."""
    value = parent[key]
    if isinstance(value, bool):
        parent[key] = not value
    elif isinstance(value, int | float):
        parent[key] = value + chance.choice((-1, 1, 16, -1000, 10**9))
    elif isinstance(value, str):
        parent[key] = chance.choice((value[:-1], value + "x", value.upper()))
    elif isinstance(value, list) and value:
        parent[key] = chance.choice((value[:-1], [*value, value[0]], value[::-1]))
    return f"{value!r} became {parent[key]!r}"


def _remove(parent: Any, key: Any, chance: random.Random) -> str:
    del parent[key]
    return "removed"


def _rename(parent: Any, key: Any, chance: random.Random) -> str:
    value = parent.pop(key)
    if isinstance(parent, dict):
        parent[chance.choice(("", "other", f"{key}x"))] = value
    return "renamed"


_CHANGES: tuple[Callable[[Any, Any, random.Random], str], ...] = (
    _replace, _replace, _replace, _nudge, _nudge, _remove, _rename,
)  # fmt: skip
