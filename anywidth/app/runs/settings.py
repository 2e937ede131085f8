"""A task's settings: one flat frozen dataclass, as JSON on disk and as text on a command line.

    @dataclass(frozen=True)
    class ClassificationSettings(Settings):
        task: ClassVar[str] = "classification"
        version: ClassVar[int] = 1

        epochs: int = option(10, "passes over the images", at_least=1)
        widths: tuple[float, ...] = option((0.25, 0.5, 1.0), "trained together")
        limit: int | None = option(None, "largest number of images")

A field is a str, int, float or bool, a `Literal` or a tuple of them, or one of these `| None`.
Pydantic checks the types; it is imported when it is first needed. To add a field, increase
`version`; if its default would change old runs, give `option` what they did as `earlier`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_origin
from typing import get_type_hints as hints_of

from anywidth.errors import AnywidthError, did_you_mean
from anywidth.json_values import check_encodable

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

SettingsType = TypeVar("SettingsType", bound="Settings")

_COMPARE = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}
# Larger numbers are mistakes, and PyTorch would refuse them in the middle of a training.
_MOST = {bool: 1, int: 2**31 - 1, float: 1e30}


def option(default: Any, help: str, earlier: Any = None, **limits: float) -> Any:
    """A field that a command line can set; `limits` are `at_least`, `above`, `at_most`, `below`.

    `earlier` is the value for data of versions that lack the field, if it is not the default.
    """
    words = {name.replace("_", " "): limit for name, limit in limits.items()}
    assert words.keys() <= _COMPARE.keys(), limits
    metadata = {"help": help, "limits": words, "earlier": earlier}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The base of all settings: a task, a version, and limits to check."""

    task: ClassVar[str]
    version: ClassVar[int]
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "strict": True,
        "extra": "forbid",
        "allow_inf_nan": False,
    }

    def check(self) -> None:
        """Refuse settings that cannot be trained.

        Opening a run does not check them, so that runs from before a limit can still be opened.
        """
        for field in dataclasses.fields(self):
            value, limits = getattr(self, field.name), field.metadata.get("limits", {})
            most = _MOST.get(type(value))
            if most is not None and not {"at most", "below"} & limits.keys() and value > most:
                limits = {"at most": most}
            if value is not None and not all(_COMPARE[w](value, limits[w]) for w in limits):
                raise AnywidthError(f"{self.given(field.name)}: expected {_limits_text(limits)}")

    def given(self, name: str) -> str:
        """A field as it is typed on a command line: `--batch-size 8` or `--no-distill`."""
        value, dashed = getattr(self, name), name.replace("_", "-")
        if isinstance(value, bool):
            return f"--{dashed}" if value else f"--no-{dashed}"
        return f"--{dashed} {_text(value)}"


@dataclasses.dataclass(frozen=True)
class FieldRow:
    """One field for help texts; `value` is in the form that `override` takes."""

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
    """Settings from the data of `to_json`.

    Every field is required, so that a run never depends on today's defaults; only data of an older
    version takes the defaults of newer fields, or what `option` calls `earlier`.
    """
    if not isinstance(data, Mapping):
        raise AnywidthError(f"settings {data!r}: expected an object of named fields")
    for name in ("version", "task"):
        if name not in data:
            raise AnywidthError(
                f"the settings have no {name!r}: expected "
                f'"version": {cls.version}, "task": "{cls.task}"'
            )
    version, task = data["version"], data["task"]
    if task != cls.task:
        raise AnywidthError(f"settings of task {task!r}: expected {cls.task!r}")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise AnywidthError(f"version {version!r} of settings: expected a whole number from 1")
    if version > cls.version:
        raise AnywidthError(
            f"the settings have version {version}, but this anywidth reads up to version "
            f"{cls.version}; install a newer anywidth"
        )
    given = {name: value for name, value in data.items() if name not in ("version", "task")}
    for one in dataclasses.fields(cls):
        if one.name in given:
            continue
        if version == cls.version:
            raise AnywidthError(f"the settings of {cls.task} have no field {one.name!r}")
        if (earlier := one.metadata.get("earlier")) is not None:
            given[one.name] = earlier
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
            option = f"--{given.replace('_', '-')}"
            raise AnywidthError(
                f"{option} {text!r}: {_said(error)}; the current value is {now!r}"
            ) from None
    return dataclasses.replace(settings, **values)


def with_fields(settings: SettingsType, data: Mapping[str, Any]) -> SettingsType:
    """A copy of `settings` with some fields from JSON data."""
    return _validated(type(settings), {**dataclasses.asdict(settings), **data})


def check_read(settings: Settings, given: Iterable[str], unread: Mapping[str, str]) -> None:
    """Refuse a field that was given but has no effect, unless it has its default or is turned off.

    `given` are names with hyphens or underscores; `unread` maps a field to the setting that makes
    it have no effect.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in (name.replace("-", "_") for name in given):
        value = getattr(settings, name)
        asks = value if isinstance(value, bool) else value != defaults[name]
        if name in unread and asks:
            raise AnywidthError(
                f"{settings.given(name)} has no effect with {unread[name]}: leave out "
                f"--{name.replace('_', '-')}"
            )


def describe(settings: Settings) -> list[FieldRow]:
    """One row per field, in order, for help texts and reports."""
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
    """Settings from JSON values: lists become tuples, whole numbers become floats."""
    from pydantic import ValidationError

    for name, value in values.items():
        if name not in _names(cls):
            raise _unknown(name, cls)
        if isinstance(value, str):
            check_encodable(value, name)
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
    """Such as `above 0, at most 1`."""
    return ", ".join(f"{word} {limit}" for word, limit in limits.items())


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _names(cls: type[Settings]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _unknown(name: str, cls: type[Settings]) -> AnywidthError:
    near = did_you_mean(name.replace("-", "_"), _names(cls), 1, "did you mean {!r}?")
    hint = near or f"known fields: {', '.join(_names(cls))}"
    return AnywidthError(f"no field {name!r} in the settings of {cls.task}; {hint}")
