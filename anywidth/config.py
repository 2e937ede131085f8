"""A task's configuration: one flat frozen dataclass, as JSON on disk and as text on a command line.

    @dataclass(frozen=True)
    class ClassificationConfig:
        task: ClassVar[str] = "classification"
        version: ClassVar[int] = 1

        epochs: int = field(default=10, metadata={"help": "passes over the training images"})
        widths: tuple[float, ...] = (0.25, 0.5, 1.0)
        limit: int | None = None

A field is a str, int, float or bool, a `Literal` of such values, a tuple of them, or one of these
`| None`. Add a field: raise `version` and give the field the default that keeps old runs as they
were.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from anywidth.errors import AnywidthError


class Config(Protocol):
    """What these functions ask of a configuration: a dataclass that names its task and version."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    task: ClassVar[str]
    version: ClassVar[int]


ConfigType = TypeVar("ConfigType", bound=Config)


class FieldRow(NamedTuple):
    """One field as a person reads it; `value` is written as `override` takes it."""

    name: str
    type: str
    value: str
    help: str


def to_json(config: Config) -> dict[str, Any]:
    """The configuration as JSON data, with its task and version."""
    kinds = _kinds(type(config))
    data: dict[str, Any] = {"version": config.version, "task": config.task}
    for name, kind in kinds.items():
        value = _checked(name, getattr(config, name), kind)
        data[name] = list(value) if isinstance(value, tuple) else value
    return data


def from_json(cls: type[ConfigType], data: Mapping[str, Any]) -> ConfigType:
    """The configuration that `to_json` wrote.

    Every field has to be there, so that a run never depends on today's defaults; only data of an
    older version takes the defaults of fields that came later.
    """
    kinds = _kinds(cls)
    if not isinstance(data, Mapping):
        raise AnywidthError(
            f"a configuration is an object of named fields, not {data!r}; {_known(kinds)}"
        )
    for name in ("version", "task"):
        if name not in data:
            raise AnywidthError(
                f"the configuration has no {name!r}; one written by anywidth says "
                f'"version": {cls.version}, "task": "{cls.task}"'
            )
    version, task = data["version"], data["task"]
    if task != cls.task:
        raise AnywidthError(f"this is a configuration of task {task!r}; expected {cls.task!r}")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise AnywidthError(f"version {version!r} of a configuration must be a whole number from 1")
    if version > cls.version:
        raise AnywidthError(
            f"the configuration has version {version}, newer than version {cls.version} which "
            "this anywidth reads; install a newer anywidth"
        )
    given = {name: value for name, value in data.items() if name not in ("version", "task")}
    for name in given:
        if name not in kinds:
            raise AnywidthError(_unknown(name, cls.task, kinds))
    has_default = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING
        or field.default_factory is not dataclasses.MISSING
    }
    for name in kinds:
        if name not in given and (version == cls.version or name not in has_default):
            raise AnywidthError(
                f"the configuration of {cls.task} has no field {name!r}; {_known(kinds)}"
            )
    return cls(**{name: _checked(name, value, kinds[name]) for name, value in given.items()})


def override(config: ConfigType, changes: Mapping[str, str]) -> ConfigType:
    """A copy of `config` with fields set from text, as typed on a command line.

        override(config, {"epochs": "3", "widths": "0.25,0.5", "limit": "none"})

    A name may be written with hyphens: `batch-size` is `batch_size`.
    """
    kinds = _kinds(type(config))
    values = {}
    for given, text in changes.items():
        name = given.replace("-", "_")
        if name not in kinds:
            raise AnywidthError(_unknown(given, config.task, kinds))
        try:
            values[name] = _parse(text, kinds[name])
        except (ValueError, KeyError):
            raise AnywidthError(
                f"{given} = {text!r} is not {_spell(kinds[name])}; "
                f"it is {_write(getattr(config, name))!r} now"
            ) from None
    return dataclasses.replace(config, **values)


def describe(config: Config) -> list[FieldRow]:
    """A row for each field, in order, for help texts and reports."""
    kinds = _kinds(type(config))
    return [
        FieldRow(
            field.name,
            _spell(kinds[field.name]),
            _write(getattr(config, field.name)),
            field.metadata.get("help", ""),
        )
        for field in dataclasses.fields(config)
    ]


def _kinds(cls: type[Config]) -> dict[str, Any]:
    """Field name → type, with a clear word to whoever declared a class that cannot be stored."""
    if not dataclasses.is_dataclass(cls) or not hasattr(cls, "task") or not hasattr(cls, "version"):
        raise AnywidthError(
            f"{cls!r} is not a task's configuration; declare a frozen dataclass with "
            '`task: ClassVar[str] = "..."` and `version: ClassVar[int] = 1`'
        )
    hints = get_type_hints(cls)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    for name, kind in kinds.items():
        try:
            _spell(kind)
        except ValueError:
            raise AnywidthError(
                f"{cls.__name__}.{name} is annotated {kind}; a field is a str, int, float or "
                "bool, a Literal or tuple of them, or one of these `| None`"
            ) from None
    return kinds


def _checked(name: str, value: object, kind: Any) -> Any:
    try:
        return _convert(value, kind)
    except ValueError:
        raise AnywidthError(f"field {name!r} is {value!r}; expected {_spell(kind)}") from None


def _convert(value: object, kind: Any) -> Any:
    """A value from JSON or Python as `kind`: lists become tuples, whole numbers floats."""
    if _is_union(kind):
        return _first_that_fits(_convert, value, get_args(kind))
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        members = _member_kinds(kind, len(value))
        return tuple(_convert(item, member) for item, member in zip(value, members, strict=True))
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if type(choice) is type(value) and choice == value:
                return value
    elif kind is NoneType and value is None:
        return None
    elif isinstance(value, bool):
        if kind is bool:
            return value
    elif kind is float and isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    elif kind in (int, str) and isinstance(value, kind):
        return value
    raise ValueError


def _parse(text: str, kind: Any) -> Any:
    """Text as `kind`; in a union, `none` and numbers are tried before plain text."""
    if _is_union(kind):
        plain_text_last = sorted(get_args(kind), key=lambda member: member is str)
        return _first_that_fits(_parse, text, plain_text_last)
    if get_origin(kind) is tuple:
        items = [item.strip() for item in text.split(",")] if text.strip() else []
        members = _member_kinds(kind, len(items))
        return tuple(_parse(item, member) for item, member in zip(items, members, strict=True))
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}[text]
    if kind is NoneType:
        return {"none": None}[text.lower()]
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    return _convert(kind(text), kind)


def _first_that_fits(read: Callable[[Any, Any], Any], value: object, kinds: Sequence[Any]) -> Any:
    for kind in kinds:
        try:
            return read(value, kind)
        except (ValueError, KeyError):
            continue
    raise ValueError


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _member_kinds(kind: Any, count: int) -> tuple[Any, ...]:
    members = get_args(kind)
    if len(members) == 2 and members[1] is Ellipsis:
        return members[:1] * count
    if len(members) != count:
        raise ValueError
    return members


def _spell(kind: Any) -> str:
    """The type in words a user of the command line knows; ValueError for an unfit one."""
    members = get_args(kind)
    if kind in (str, int, float, bool):
        return str(kind.__name__)
    if kind is NoneType:
        return "none"
    if _is_union(kind):
        return " or ".join(_spell(member) for member in members)
    if get_origin(kind) is Literal:
        return " | ".join(map(str, members))
    if get_origin(kind) is tuple and members:
        if members[-1] is Ellipsis:
            return f"{_spell(members[0])},..."
        return ",".join(_spell(member) for member in members)
    raise ValueError


def _write(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(_write(item) for item in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _known(kinds: Mapping[str, Any]) -> str:
    return f"known fields: {', '.join(kinds)}"


def _unknown(name: str, task: str, kinds: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), kinds, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"no field {name!r} in the configuration of {task}; {hint}{_known(kinds)}"
