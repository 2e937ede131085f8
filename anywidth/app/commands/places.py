"""Where a run's data lies, which may be another place than when the run began."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from anywidth.app.data.arrays import ARRAY_NAMES
from anywidth.app.tasks.classification.config import ClassificationConfig, check_choices
from anywidth.app.tasks.recipes import TrainingConfig
from anywidth.errors import AnywidthError

DataDir = Annotated[Path | None, typer.Option(help="Where the data lies now, if it has moved.")]
EvalDir = Annotated[
    Path | None, typer.Option(help="Super-resolution: where the evaluation pictures lie now.")
]


def anchored(config: TrainingConfig) -> TrainingConfig:
    """The same places as absolute paths, so that a run is not tied to the working directory."""
    if isinstance(config, ClassificationConfig) and _names_a_folder(config):
        config = dataclasses.replace(config, data="folder", data_dir=config.data)
    places = {name: getattr(config, name, None) for name in ("data_dir", "eval_dir", "cache_dir")}
    return _placed(config, {name: Path(place) for name, place in places.items() if place})


def moved(
    config: TrainingConfig, data_dir: Path | None = None, eval_dir: Path | None = None
) -> TrainingConfig:
    """A run's configuration with its data where it lies now, as far as that is said."""
    given = {"data_dir": data_dir, "eval_dir": eval_dir}
    places = {name: place for name, place in given.items() if place is not None}
    fields = {field.name for field in dataclasses.fields(config)}
    for name, place in places.items():
        if name not in fields:
            raise AnywidthError(
                f"--{name.replace('_', '-')} {place}: a run of {config.task} reads no such folder; "
                "leave the option out"
            )
    config = _placed(config, places)
    if places and isinstance(config, ClassificationConfig):
        check_choices(config)
    return config


def _names_a_folder(config: ClassificationConfig) -> bool:
    is_name = config.data in (*ARRAY_NAMES, "folder")
    return not is_name and config.data_dir is None and Path(config.data).is_dir()


def _placed(config: TrainingConfig, places: dict[str, Path]) -> TrainingConfig:
    absolute: dict[str, Any] = {
        name: str(place.expanduser().absolute()) for name, place in places.items()
    }
    return dataclasses.replace(config, **absolute)
