"""The tasks, and the task of a run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anywidth.app.own_command import own_command
from anywidth.app.runs.loop import load_final
from anywidth.app.runs.run import MEND, Run
from anywidth.app.tasks.task_names import TASKS
from anywidth.app.tasks.task_settings import TaskSettings, read_settings
from anywidth.app.tasks.trained import Trained
from anywidth.distributed import local_device, rank
from anywidth.errors import AnywidthError, errors_about


@dataclass(frozen=True)
class Task:
    """A task: the classes of its settings and of its finished runs, and what commands need.

    Args:
        train: (run, settings) → whether training is complete.
        recipes: ready settings; the first trains in minutes on a CPU.
        command: the command that uses a finished run.
    """

    settings: type[TaskSettings]
    trained: type[Trained]
    train: Callable[[Run, Any], bool]
    recipes: Sequence[Callable[[], TaskSettings]]
    command: Callable[..., None]

    @property
    def name(self) -> str:
        return self.settings.task

    def open(
        self,
        folder: str | Path,
        device: str = "auto",
        with_data: bool = True,
        settings: TaskSettings | None = None,
    ) -> Any:
        """A finished run; `settings` replace its own, for data that has moved."""
        run = Run.open_finished(folder, writing=rank() == 0)
        settings = settings or read_settings(run, self.settings)
        place = local_device(device)
        model = self.trained.network(run, settings)
        load_final(model, run)
        trained = self.trained(run, settings, model.to(place).eval())
        return trained.with_data() if with_data else trained


def task_named(name: object) -> Task:
    if name not in TASKS:
        raise AnywidthError(
            f"task {name!r}: expected {', '.join(TASKS)}; the run may need a newer anywidth"
        )
    task: Task = importlib.import_module(f"anywidth.app.tasks.{name}.task").TASK
    return task


def task_of(run: Run) -> Task:
    path = run.folder / "config.json"
    if "task" not in run.settings_data:
        raise AnywidthError(f"{path}: damaged, it has no task; {MEND}")
    with errors_about(path):
        return task_named(run.settings_data["task"])


def settings_of(folder: Path, *, trust: bool = False, model: str | None = None) -> TaskSettings:
    """The settings a run was started with; `trust` and `model` as for `read_settings`."""
    run = Run.open(folder)
    return read_settings(run, task_of(run).settings, trust=trust, model=model)


def check_same_task(runs: Sequence[Run]) -> None:
    """Refuse runs of different tasks."""
    first = task_of(runs[0]).name
    for run in runs[1:]:
        if (name := task_of(run).name) != first:
            raise AnywidthError(
                f"{runs[0].folder} is a run of {first} and {run.folder} of {name}: give runs of "
                "one task"
            )


def open_trained(
    folder: Path,
    device: str = "auto",
    with_data: bool = True,
    *,
    trust: bool = False,
    model: str | None = None,
    **places: Path | None,
) -> Trained:
    """A finished run of any task; its data may have moved."""
    settings = settings_of(folder, trust=trust, model=model).moved(**places)
    trained: Trained = task_named(settings.task).open(folder, device, with_data, settings)
    return trained


def check_task(folder: Path, name: str) -> None:
    """Refuse a run of another task than a command's."""
    task, found = task_named(name), task_of(Run.open(folder))
    if found.name != name:
        fitting = own_command(found.command.__name__, folder)
        raise AnywidthError(
            f"{folder} is a run of {found.name}: use {fitting}; "
            f"{task.command.__name__} needs a run of {name}, which anywidth train "
            f"{task.recipes[0].__name__} makes"
        )


def all_recipes() -> dict[str, Callable[[], TaskSettings]]:
    """The recipes of all tasks by name."""
    return {recipe.__name__: recipe for name in TASKS for recipe in task_named(name).recipes}


def recipe(name: str | None) -> TaskSettings:
    """The settings of a recipe by its name; of the first if there is none."""
    found = all_recipes()
    name = name or next(iter(found))
    if name not in found:
        raise AnywidthError(f"no recipe {name!r}: expected one of {', '.join(found)}")
    return found[name]()
