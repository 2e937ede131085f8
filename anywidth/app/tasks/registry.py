"""The tasks there are, and which of them a run belongs to."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anywidth.app.runs.run import MEND, Run
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.app.tasks.trained import Trained
from anywidth.errors import AnywidthError

TASKS = ("classification", "super_resolution", "reinforcement")
"""The folders beside this file, one per task; `task.py` in it defines `TASK`."""


@dataclass(frozen=True)
class Task:
    """What the commands need of a task; the rest they ask its settings and its finished runs.

    Args:
        settings: the class of its settings.
        trained: the class of its finished runs.
        train: (run, settings) → whether training came to its end.
        open: (folder, device, with_data, settings) → a finished run.
        recipes: ready settings by name; the first trains in minutes on a CPU.
        command: what a finished run is for.
    """

    settings: type[TaskSettings]
    trained: type[Trained]
    train: Callable[[Run, Any], bool]
    open: Callable[..., Any]
    recipes: Sequence[Callable[[], TaskSettings]]
    command: Callable[..., None]

    @property
    def name(self) -> str:
        return self.settings.task


def task_named(name: object) -> Task:
    if name not in TASKS:
        raise AnywidthError(
            f"a run of task {name!r}: expected {', '.join(TASKS)}; it may need a newer anywidth"
        )
    task: Task = importlib.import_module(f"anywidth.app.tasks.{name}.task").TASK
    return task


def task_of(run: Run) -> Task:
    path = run.folder / "config.json"
    if "task" not in run.settings_data:
        raise AnywidthError(f"{path}: no task in it, so the run is damaged; {MEND}")
    try:
        return task_named(run.settings_data["task"])
    except AnywidthError as error:
        raise AnywidthError(f"{path}: {error}") from error


def settings_of(folder: Path) -> TaskSettings:
    """The settings a run was started with."""
    run = Run.open(folder)
    return run.read_settings(task_of(run).settings)


def check_same_task(runs: Sequence[Run]) -> None:
    """Refuses runs whose numbers say different things."""
    first = task_of(runs[0]).name
    for run in runs[1:]:
        if (name := task_of(run).name) != first:
            raise AnywidthError(
                f"{runs[0].folder} is a run of {first} and {run.folder} of {name}: name runs of "
                "one task"
            )


def open_trained(
    folder: Path, device: str = "auto", with_data: bool = True, **places: Path | None
) -> Trained:
    """A finished run of any task, with its data where it lies now."""
    settings = settings_of(folder).moved(**places)
    trained: Trained = task_named(settings.task).open(folder, device, with_data, settings)
    return trained


def open_only(name: str, folder: Path, device: str) -> Any:
    """A finished run of the one task that a command is for, without its data."""
    task, found = task_named(name), task_of(Run.open(folder))
    if found.name != name:
        raise AnywidthError(
            f"{folder} is a run of {found.name}, for: anywidth {found.command.__name__} {folder}; "
            f"{task.command.__name__} needs one of {name}, train it with: anywidth train "
            f"{task.recipes[0].__name__}"
        )
    return task.open(folder, device, False, None)


def all_recipes() -> dict[str, Callable[[], TaskSettings]]:
    """The recipes of all tasks by name."""
    return {recipe.__name__: recipe for name in TASKS for recipe in task_named(name).recipes}


def recipe(name: str) -> TaskSettings:
    """The settings of a recipe by its name."""
    found = all_recipes()
    if name not in found:
        raise AnywidthError(f"no recipe {name!r}; there are {', '.join(found)}")
    return found[name]()
