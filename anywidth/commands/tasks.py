"""Which task a run belongs to, and what a task can do: the one place that tells tasks apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anywidth.commands.places import moved
from anywidth.config import from_json
from anywidth.errors import AnywidthError
from anywidth.recipes import TrainingConfig
from anywidth.report import Section
from anywidth.results import Trained
from anywidth.run import Run


def _no_sections(trained: Any) -> list[Section]:
    return []


@dataclass(frozen=True)
class Task:
    """What the commands need of a task.

    Args:
        config: the class of its configurations.
        train: (run, configuration) → whether training came to its end.
        open: (folder, device, with_data, configuration) → a finished run.
        sections: finished run → what its report shows beside the spectrum.
        sections_need_data: whether `sections` wants the run opened with its data.
    """

    config: type[Any]
    train: Callable[[Run, Any], bool]
    open: Callable[[Path, str, bool, Any], Trained]
    sections: Callable[[Any], Sequence[Section]] = _no_sections
    sections_need_data: bool = False


def task_named(name: object) -> Task:
    """The task of a configuration; what it needs is imported only now."""
    if name == "classification":
        from anywidth.tasks import classification

        return Task(
            classification.ClassificationConfig,
            classification.train_run,
            classification.open_trained,
        )
    if name == "super_resolution":
        from anywidth.commands.crops import crop_sections
        from anywidth.tasks import super_resolution

        return Task(
            super_resolution.SuperResolutionConfig,
            super_resolution.train_run,
            super_resolution.open_trained,
            crop_sections,
            sections_need_data=True,
        )
    if name == "reinforcement":
        from anywidth.tasks import reinforcement

        return Task(
            reinforcement.ReinforcementConfig,
            reinforcement.train_run,
            reinforcement.open_trained,
        )
    raise AnywidthError(
        f"a run of task {name!r}: expected classification, super_resolution or reinforcement; it "
        "may need a newer anywidth"
    )


def task_of(folder: Path) -> Task:
    return task_named(Run.open(folder).config_data.get("task"))


def config_of(folder: Path) -> TrainingConfig:
    """The configuration a run was started with."""
    data = Run.open(folder).config_data
    config: TrainingConfig = from_json(task_named(data.get("task")).config, data)
    return config


def open_trained(
    folder: Path,
    device: str = "auto",
    with_data: bool = True,
    data_dir: Path | None = None,
    eval_dir: Path | None = None,
) -> Trained:
    """A finished run of any task, with its data where it lies now."""
    config = moved(config_of(folder), data_dir, eval_dir)
    return task_named(config.task).open(folder, device, with_data, config)
