"""Where a run's data lies, which may be another place than when the run began."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from anywidth.app.data.arrays import ARRAY_NAMES
from anywidth.app.tasks.classification.settings import ClassificationSettings, check_choices
from anywidth.app.tasks.recipes import AnySettings
from anywidth.errors import AnywidthError

DataDir = Annotated[Path | None, typer.Option(help="Where the data lies now, if it has moved.")]
EvalDir = Annotated[
    Path | None, typer.Option(help="Super-resolution: where the evaluation pictures lie now.")
]


def anchored(settings: AnySettings) -> AnySettings:
    """The same places as absolute paths, so that a run is not tied to the working directory."""
    if isinstance(settings, ClassificationSettings) and _names_a_folder(settings):
        settings = dataclasses.replace(settings, data="folder", data_dir=settings.data)
    places = {name: getattr(settings, name, None) for name in ("data_dir", "eval_dir", "cache_dir")}
    return _placed(settings, {name: Path(place) for name, place in places.items() if place})


def moved(
    settings: AnySettings, data_dir: Path | None = None, eval_dir: Path | None = None
) -> AnySettings:
    """A run's configuration with its data where it lies now, as far as that is said."""
    given = {"data_dir": data_dir, "eval_dir": eval_dir}
    places = {name: place for name, place in given.items() if place is not None}
    fields = {field.name for field in dataclasses.fields(settings)}
    for name, place in places.items():
        if name not in fields:
            raise AnywidthError(
                f"--{name.replace('_', '-')} {place}: a run of {settings.task} reads no such "
                "folder; leave the option out"
            )
    settings = _placed(settings, places)
    if places and isinstance(settings, ClassificationSettings):
        check_choices(settings)
    return settings


def _names_a_folder(settings: ClassificationSettings) -> bool:
    is_name = settings.data in (*ARRAY_NAMES, "folder")
    return not is_name and settings.data_dir is None and Path(settings.data).is_dir()


def _placed(settings: AnySettings, places: dict[str, Path]) -> AnySettings:
    absolute: dict[str, Any] = {
        name: str(place.expanduser().absolute()) for name, place in places.items()
    }
    return dataclasses.replace(settings, **absolute)
