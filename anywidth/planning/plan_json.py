"""The fields of a plan to and from JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from anywidth.errors import AnywidthError
from anywidth.json_values import (
    checksum_of,
    flag,
    listed,
    mapped,
    number,
    optional,
    record,
    refuse,
    row,
    text,
    whole,
)
from anywidth.planning.parts import (
    DEEPEST,
    AttributeSlot,
    ChannelGroup,
    CostTerm,
    Example,
    Segment,
)
from anywidth.width import WidthRange

VERSION = 1
_CHECKSUM = "sha256"
_AGAIN = "Make it again with anywidth.plan(model, example_input)"


def fields_to_json(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Data for `json.dump`, from the fields of a plan by name."""
    widths: WidthRange = plan["widths"]
    as_they_are = ("inputs", "scales", "outputs", "folds", "activations", "prologues", "sums",
                   "rehearsed", "example", "notes", "parts")  # fmt: skip
    data = _with_lists(
        {
            "version": VERSION,
            "widths": (widths.low, widths.high, widths.divisor),
            "groups": [vars(group) for group in plan["groups"].values()],
            "tensors": {
                name: {"shape": plan["shapes"][name], "axes": axes}
                for name, axes in plan["tensors"].items()
            },
            "parameters": plan["parameters"],
            # Rows of their fields, in the order of the classes.
            "attributes": [list(vars(slot).values()) for slot in plan["attributes"]],
            "costs": [list(vars(cost).values()) for cost in plan["costs"]],
            **{name: plan[name] for name in as_they_are},
        }
    )
    return {**data, _CHECKSUM: checksum_of(data)}


def _with_lists(value: Any) -> Any:
    """A copy with lists in place of tuples, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def fields_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan by name; raises if the data is not a plan."""
    version = data.get("version") if isinstance(data, Mapping) else None
    if version != VERSION or isinstance(version, bool):
        raise AnywidthError(
            f"plan of version {version!r}: expected version {VERSION}, as plan.to_json() of this "
            "version of anywidth writes it"
        )
    given = {name: value for name, value in data.items() if name != "version"}
    try:
        found = _PLAN(given, "")
    except AnywidthError as error:
        raise AnywidthError(f"damaged plan: {error}. {_AGAIN}") from error
    expected = found.pop(_CHECKSUM)
    if expected not in (None, checksum_of({n: v for n, v in data.items() if n != _CHECKSUM})):
        raise AnywidthError(
            f"damaged plan: it does not match its checksum. {_AGAIN}; if it was edited on purpose, "
            f"remove its {_CHECKSUM!r}"
        )
    names = [group.name for group in found["groups"]]
    if len(set(names)) < len(names):
        raise AnywidthError(f"damaged plan: two groups have one name. {_AGAIN}")
    tensors = found.pop("tensors")
    return {
        **found,
        "groups": dict(zip(names, found["groups"], strict=True)),
        "tensors": {name: tuple(tensor["axes"]) for name, tensor in tensors.items()},
        "shapes": {name: tuple(tensor["shape"]) for name, tensor in tensors.items()},
        "parameters": tuple(found["parameters"]),
        "widths": WidthRange(*found["widths"]),
    }


# ---- the schema ---------------------------------------------------------------------------------

_names = listed(text)
_pair = row(text, text)
_segment = row(text, whole(1))
_group_fields = record(
    {
        "name": text,
        "channels": whole(1),
        "unit": whole(1),
        "divisor": optional(whole(1)),
        "fixed": optional(text),
        "tied": optional(row(text, whole(1))),
        "makers": _names,
        "readers": _names,
        "roles": _names,
    },
    # Files of older versions lack these.
    {"roles": []},
)
# A larger example would not be made in any memory.
_MOST_ENTRIES = 2**31


def _group(value: Any, at: str) -> ChannelGroup:
    found = _group_fields(value, at)
    lists = {name: tuple(found[name]) for name in ("makers", "readers", "roles")}
    return ChannelGroup(**{**found, **lists})


def _axis(value: Any, at: str) -> tuple[Segment, ...]:
    return tuple(Segment(*one) for one in listed(_segment)(value, at))


def _slot(value: Any, at: str) -> AttributeSlot:
    """A row of six; files of older versions leave out the last ones."""
    least, most = 3, 6
    padded = [*value, *[None] * most][:most] if isinstance(value, list | tuple) else value
    if isinstance(value, list | tuple) and not least <= len(value) <= most:
        refuse(at, value, f"a list of {most}")
    kinds = (text, text, _axis, optional(whole(0)), optional(number), optional(number))
    return AttributeSlot(*row(*kinds)(padded, at))


def _shape(value: Any, at: str) -> list[int]:
    found = listed(whole(0))(value, at)
    is_small = math.prod(found) <= _MOST_ENTRIES
    return found if is_small else refuse(at, value, f"at most {_MOST_ENTRIES:,} entries")


def _cost(value: Any, at: str) -> CostTerm:
    is_short = isinstance(value, list | tuple) and len(value) == 3
    given = [*value, []] if is_short else value  # of an earlier version
    layer, factor, axes, held = row(text, whole(0), listed(_axis), listed(text))(given, at)
    return CostTerm(layer, factor, tuple(axes), tuple(held))


def _example(value: Any, at: str, depth: int = DEEPEST) -> Example:
    """An argument as `described` has it; lists and dicts may be in each other, `depth` deep."""
    is_group = isinstance(value, Mapping) and value.keys() & {"items", "named"}
    if not is_group:
        return _single(value, at)
    if not depth:
        refuse(at, value, "fewer lists and dicts in each other")

    def inner(one: Any, where: str) -> Example:
        return _example(one, where, depth - 1)

    is_list = "items" in value
    fields: dict[str, Any] = {"items": listed(inner)} if is_list else {"named": mapped(inner)}
    return record(fields)(value, at)


def _single(value: Any, at: str) -> Example:
    if not isinstance(value, Mapping):
        shape, dtype = row(_shape, _dtype)(value, at)
        return tuple(shape), dtype
    if "type" in value:
        return record({"type": text})(value, at)
    if "value" in value:
        return record({"value": _plain})(value, at)
    rest = {"values": listed(_plain)} if "values" in value else dict.fromkeys(("low", "high"), _int)
    found = record({"shape": _shape, "dtype": _dtype, **rest})(value, at)
    if "values" in found and len(found["values"]) != math.prod(found["shape"]):
        refuse(at, found["values"], f"{math.prod(found['shape'])} values")
    if "low" in found and found["low"] > found["high"]:
        refuse(f"{at}.high", found["high"], f"at least {found['low']}")
    return found


_int = whole(-(2**63), 2**63 - 2)


def _plain(value: Any, at: str) -> Any:
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else refuse(at, value, "a number, text or null")


def _dtype(value: Any, at: str) -> str:
    found = getattr(torch, value, None) if isinstance(value, str) else None
    return value if isinstance(found, torch.dtype) else refuse(at, value, "a dtype, as float32")


_PLAN = record(
    {
        "widths": row(number, number, whole(1)),
        "groups": listed(_group),
        "tensors": mapped(record({"shape": listed(whole(0)), "axes": listed(optional(_axis))})),
        "parameters": _names,
        "attributes": listed(_slot),
        "costs": listed(_cost),
        "inputs": mapped(whole(0)),
        "scales": mapped(row(_axis, number)),
        "outputs": mapped(optional(_axis)),
        "folds": listed(_pair),
        "activations": listed(_pair),
        "prologues": listed(row(text, text, text)),
        "sums": _names,
        "rehearsed": flag,
        "example": listed(_example),
        "notes": _names,
        "parts": _names,
        _CHECKSUM: optional(text),
    },
    # Files of older versions lack these.
    {
        "scales": {},
        "activations": [],
        "prologues": [],
        "sums": [],
        "rehearsed": False,
        "parts": [],
        _CHECKSUM: None,
    },
)
