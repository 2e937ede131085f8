"""A task's settings: one flat frozen dataclass, as JSON on disk and as text on a command line.

    @dataclass(frozen=True)
    class ClassificationSettings(Settings):
        task: ClassVar[str] = "classification"
        version: ClassVar[int] = 1

        epochs: int = option(10, "passes over the images", at_least=1)
        widths: tuple[float, ...] = option((0.25, 0.5, 1.0), "trained together")
        limit: int | None = option(None, "use only so many images")

A field is a str, int, float or bool, a `Literal` or a tuple of them, or one of these `| None`.
Pydantic reads the types; it is imported when there is something to read. Add a field: raise
`version` and give the field the default that keeps old runs as they were.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import operator
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_origin
from typing import get_type_hints as hints_of

from anywidth.errors import AnywidthError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

SettingsType = TypeVar("SettingsType", bound="Settings")

_COMPARE = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}


def option(default: Any, help: str, **limits: float) -> Any:
    """A field that a command line can set.

    Args:
        default: its value unless told.
        help: what it means.
        limits: `at_least`, `above`, `at_most` and `below`, of a number.
    """
    words = {name.replace("_", " "): limit for name, limit in limits.items()}
    assert words.keys() <= _COMPARE.keys(), limits
    return dataclasses.field(default=default, metadata={"help": help, "limits": words})


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every task's settings have: a name, a version, and limits that can be checked."""

    task: ClassVar[str]
    version: ClassVar[int]
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "strict": True,
        "extra": "forbid",
        "allow_inf_nan": False,
    }

    def check(self) -> None:
        """Refuses what cannot be trained.

        Reading a run does not ask this: one begun before a limit was set can still be opened.
        """
        for field in dataclasses.fields(self):
            value, limits = getattr(self, field.name), field.metadata.get("limits", {})
            for word, limit in limits.items():
                if value is not None and not _COMPARE[word](value, limit):
                    raise AnywidthError(f"{field.name}={value}: expected {_limits_text(limits)}")


@dataclasses.dataclass(frozen=True)
class FieldRow:
    """One field as a person reads it; `value` is written as `override` takes it."""

    name: str
    value: str
    help: str
    allowed: str = ""


def to_json(settings: Settings) -> dict[str, Any]:
    """The settings as JSON data, with their task and version."""
    values = dataclasses.asdict(settings)
    checked = dataclasses.asdict(_validated(type(settings), values))
    listed = {n: list(v) if isinstance(v, tuple) else v for n, v in checked.items()}
    return {"version": settings.version, "task": settings.task, **listed}


def from_json(cls: type[SettingsType], data: Mapping[str, Any]) -> SettingsType:
    """The settings that `to_json` wrote.

    Every field has to be there, so that a run never depends on today's defaults; only data of an
    older version takes the defaults of fields that came later.
    """
    if not isinstance(data, Mapping):
        raise AnywidthError(f"settings are an object of named fields, not {data!r}")
    for name in ("version", "task"):
        if name not in data:
            raise AnywidthError(
                f"the settings have no {name!r}; those written by anywidth say "
                f'"version": {cls.version}, "task": "{cls.task}"'
            )
    version, task = data["version"], data["task"]
    if task != cls.task:
        raise AnywidthError(f"these are settings of task {task!r}; expected {cls.task!r}")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise AnywidthError(f"version {version!r} of settings must be a whole number from 1")
    if version > cls.version:
        raise AnywidthError(
            f"the settings have version {version}, newer than version {cls.version} which this "
            "anywidth reads; install a newer anywidth"
        )
    given = {name: value for name, value in data.items() if name not in ("version", "task")}
    for name in _names(cls):
        if name not in given and version == cls.version:
            raise AnywidthError(f"the settings of {cls.task} have no field {name!r}")
    return _validated(cls, given)


def override(settings: SettingsType, changes: Mapping[str, str]) -> SettingsType:
    """A copy of `settings` with fields set from text, as typed on a command line.

        override(settings, {"epochs": "3", "widths": "0.25,0.5", "limit": "none"})

    A name may be written with hyphens: `batch-size` is `batch_size`.
    """
    from pydantic import ValidationError

    cls, values = type(settings), {}
    for given, text in changes.items():
        name = given.replace("-", "_")
        if name not in _names(cls):
            raise _unknown(given, cls)
        kind = hints_of(cls)[name]
        value: Any = text
        if tuple in (get_origin(kind), *map(get_origin, get_args(kind))):
            value = text.split(",") if text.strip() else []
        if text.lower() == "none" and NoneType in get_args(kind):
            value = None
        try:
            values[name] = _adapter(kind).validate_python(value, strict=False)
        except ValidationError as error:
            now = _text(getattr(settings, name))
            raise AnywidthError(f"{given}={text!r}: {_said(error)}; it is {now!r} now") from None
    return dataclasses.replace(settings, **values)


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
    rows = []
    for field in dataclasses.fields(settings):
        kind = hints_of(type(settings))[field.name]
        allowed = _limits_text(field.metadata.get("limits", {}))
        if get_origin(kind) is Literal:
            allowed = " | ".join(get_args(kind))
        value = _text(getattr(settings, field.name))
        rows.append(FieldRow(field.name, value, field.metadata.get("help", ""), allowed))
    return rows


def _validated(cls: type[SettingsType], values: Mapping[str, Any]) -> SettingsType:
    """The settings of values as JSON has them: lists become tuples, whole numbers floats."""
    from pydantic import ValidationError

    for name in values:
        if name not in _names(cls):
            raise _unknown(name, cls)
    kind: Any = cls
    try:
        found: SettingsType = _adapter(kind).validate_json(json.dumps(values))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise AnywidthError(f"{name}={values[name]!r}: {_said(error)}") from None
    return found


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    is_class = isinstance(kind, type) and issubclass(kind, Settings)
    return TypeAdapter(kind, config=None if is_class else {"allow_inf_nan": False})


def _said(error: ValidationError) -> str:
    """What was expected: `expected a valid integer`."""
    text = error.errors()[0]["msg"].partition(", unable")[0]
    return text.replace("Input should be", "expected")


def _limits_text(limits: Mapping[str, float]) -> str:
    """Say `above 0, at most 1`."""
    return ", ".join(f"{word} {limit}" for word, limit in limits.items())


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _names(cls: type[Settings]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _unknown(name: str, cls: type[Settings]) -> AnywidthError:
    close = difflib.get_close_matches(name.replace("-", "_"), _names(cls), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(_names(cls))}"
    return AnywidthError(f"no field {name!r} in the settings of {cls.task}; {hint}")
