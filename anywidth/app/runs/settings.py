"""A task's configuration: one flat frozen dataclass, as JSON on disk and as text on a command line.

    @dataclass(frozen=True)
    class ClassificationSettings:
        task: ClassVar[str] = "classification"
        version: ClassVar[int] = 1

        epochs: int = field(default=10, metadata=about("passes over the images", at_least=1))
        widths: tuple[float, ...] = (0.25, 0.5, 1.0)
        limit: int | None = None

A field is a str, int, float or bool, a `Literal` of such values, a tuple of them, or one of these
`| None`. Add a field: raise `version` and give the field the default that keeps old runs as they
were. `check_ranges` is for what is about to be trained: reading a run never asks it, so that one
begun before a limit was set can still be opened.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class Settings(Protocol):
    """What these functions ask of a configuration: a dataclass that names its task and version."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    task: ClassVar[str]
    version: ClassVar[int]


SettingsType = TypeVar("SettingsType", bound=Settings)


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers a field may have; as text, what an error or a help text calls them."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    one_of: tuple[float, ...] = ()

    def __contains__(self, value: float) -> bool:
        return (
            (not self.one_of or value in self.one_of)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.one_of:
            *first, last = map(str, self.one_of)
            return f"{', '.join(first)} or {last}"
        has_top = self.at_most is not None or self.below is not None
        if not has_top:
            return f"at least {self.at_least}" if self.above is None else f"above {self.above}"
        top = f"{self.at_most}]" if self.below is None else f"{self.below})"
        if self.above is not None:
            return f"in ({self.above}, {top}"
        return f"from {self.at_least} to {'' if self.below is None else 'below '}{top[:-1]}"


def about(
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    one_of: tuple[float, ...] = (),
) -> dict[str, Any]:
    """A field's metadata: what it means, and the numbers it may have (of a tuple, each of them)."""
    limits = Range(at_least, above, at_most, below, one_of)
    return {"help": help} if limits == Range() else {"help": help, "range": limits}


class FieldRow(NamedTuple):
    """One field as a person reads it; `value` is written as `override` takes it."""

    name: str
    value: str
    help: str
    allowed: str = ""


def to_json(settings: Settings) -> dict[str, Any]:
    """The configuration as JSON data, with its task and version."""
    kinds = _kinds(type(settings))
    data: dict[str, Any] = {"version": settings.version, "task": settings.task}
    for name, kind in kinds.items():
        value = _checked(name, getattr(settings, name), kind)
        data[name] = list(value) if isinstance(value, tuple) else value
    return data


def from_json(cls: type[SettingsType], data: Mapping[str, Any]) -> SettingsType:
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


def override(settings: SettingsType, changes: Mapping[str, str]) -> SettingsType:
    """A copy of `settings` with fields set from text, as typed on a command line.

        override(settings, {"epochs": "3", "widths": "0.25,0.5", "limit": "none"})

    A name may be written with hyphens: `batch-size` is `batch_size`.
    """
    kinds = _kinds(type(settings))
    values = {}
    for given, text in changes.items():
        name = given.replace("-", "_")
        if name not in kinds:
            raise AnywidthError(_unknown(given, settings.task, kinds))
        try:
            values[name] = _parse(text, kinds[name])
        except (ValueError, KeyError):
            raise AnywidthError(
                f"{given} = {text!r}: expected {_in_words(kinds[name])}; "
                f"it is {_write(getattr(settings, name))!r} now"
            ) from None
    return dataclasses.replace(settings, **values)


def check_ranges(settings: Settings) -> None:
    """Refuses a number that its field's range does not hold, and names both."""
    for field in dataclasses.fields(settings):
        limits = field.metadata.get("range")
        value = getattr(settings, field.name)
        if limits is None or value is None:
            continue
        if not all(number in limits for number in (value if isinstance(value, tuple) else [value])):
            raise AnywidthError(f"{field.name}={value}: expected {_noun(limits, value)}{limits}")


def check_read(settings: Settings, given: Iterable[str], unread: Mapping[str, str]) -> None:
    """Refuses a field that was given though nothing reads it.

    Args:
        settings: with what was given.
        given: names of fields, with hyphens or underscores. A switch turned off, or a default
            given again, asks for nothing.
        unread: field → the choice because of which nothing reads it.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in (name.replace("-", "_") for name in given):
        value = getattr(settings, name)
        asks = value if isinstance(value, bool) else value != defaults[name]
        if name in unread and asks:
            raise AnywidthError(
                f"{name}={value!r} is not read with {unread[name]}: leave out "
                f"--{name.replace('_', '-')}"
            )


def describe(settings: Settings) -> list[FieldRow]:
    """A row for each field, in order, for help texts and reports."""
    kinds = _kinds(type(settings))
    return [
        FieldRow(
            field.name,
            _write(getattr(settings, field.name)),
            field.metadata.get("help", ""),
            _allowed(kinds[field.name], field.metadata.get("range")),
        )
        for field in dataclasses.fields(settings)
    ]


def _noun(limits: Range, value: object) -> str:
    if isinstance(value, tuple):
        return "numbers "
    if limits.above is None and limits.at_most is None and limits.below is None:
        return ""
    is_share = limits.at_least == 0 and 1 in (limits.at_most, limits.below)
    return "a share " if is_share else "a number "


def _allowed(kind: Any, limits: Range | None) -> str:
    """The choices of a `Literal`, or the numbers in range."""
    if get_origin(kind) is Literal:
        return _spell(kind)
    return "" if limits is None else str(limits)


def _kinds(cls: type[Settings]) -> dict[str, Any]:
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


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _in_words(kind: Any) -> str:
    """What to type for a type."""
    members = get_args(kind)
    if kind in _WORDS:
        return _WORDS[kind]
    if _is_union(kind):
        return " or ".join(_in_words(member) for member in members)
    if get_origin(kind) is tuple and members[-1] is Ellipsis:
        example = {int: "such as 1,2", float: "such as 0.25,0.5"}.get(members[0])
        return f"numbers {example}" if example else f"a list of {_in_words(members[0])}"
    if get_origin(kind) is tuple:
        return ",".join(_in_words(member) for member in members)
    return _spell(kind)


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
