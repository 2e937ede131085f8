"""Which task a run belongs to, and what a task can do: the one table of tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from anywidth.app.commands.places import moved
from anywidth.app.runs.run import MEND, Run
from anywidth.app.showing.report import Section
from anywidth.app.showing.results import Trained
from anywidth.app.tasks import deployment, examples
from anywidth.app.tasks.classification import settings as classification_settings
from anywidth.app.tasks.classification import task as classification
from anywidth.app.tasks.examples import Example
from anywidth.app.tasks.recipes import AnySettings
from anywidth.app.tasks.reinforcement import settings as reinforcement_settings
from anywidth.app.tasks.reinforcement import task as reinforcement
from anywidth.app.tasks.super_resolution import settings as super_resolution_settings
from anywidth.app.tasks.super_resolution import task as super_resolution
from anywidth.app.tasks.super_resolution.crops import crop_sections
from anywidth.deploying.deployment import Deployment
from anywidth.errors import AnywidthError

TrainedType = TypeVar("TrainedType", bound=Trained)


def _no_sections(trained: Any) -> list[Section]:
    return []


@dataclass(frozen=True)
class Task(Generic[TrainedType]):
    """What the commands need of a task.

    Args:
        settings: the class of its configurations.
        check: refuses a configuration that cannot be trained as it is.
        unread: configuration → fields that nothing reads, and why.
        train: (run, configuration) → whether training came to its end.
        open: (folder, device, with_data, configuration) → a finished run.
        example: what trains one with everything at its default.
        use: the command that a finished run is for.
        deploy: finished run → how its network is called in what `anywidth export` writes.
        examples: finished run → inputs to try; those of its data need it opened with them.
        sections: finished run → what its report shows beside the spectrum.
        sections_need_data: whether `sections` wants the run opened with its data.
    """

    settings: type[Any]
    check: Callable[[Any], None]
    unread: Callable[[Any], dict[str, str]]
    train: Callable[[Run, Any], bool]
    open: Callable[[Path, str, bool, Any], TrainedType]
    example: str
    use: str
    deploy: Callable[[Any], Deployment]
    examples: Callable[[Any], Sequence[Example]]
    sections: Callable[[Any], Sequence[Section]] = _no_sections
    sections_need_data: bool = False

    @property
    def name(self) -> str:
        return str(self.settings.task)


CLASSIFICATION = Task(
    classification_settings.ClassificationSettings,
    classification_settings.check_choices,
    classification_settings.unread_fields,
    classification.train_run,
    classification.open_trained,
    "anywidth train",
    "anywidth predict",
    deployment.deployed_classifier,
    examples.classifier_examples,
)
SUPER_RESOLUTION = Task(
    super_resolution_settings.SuperResolutionSettings,
    super_resolution_settings.check_choices,
    super_resolution_settings.unread_fields,
    super_resolution.train_run,
    super_resolution.open_trained,
    "anywidth train sr",
    "anywidth upscale",
    deployment.deployed_upscaler,
    examples.upscaler_examples,
    crop_sections,
    sections_need_data=True,
)
REINFORCEMENT = Task(
    reinforcement_settings.ReinforcementSettings,
    reinforcement_settings.check_choices,
    reinforcement_settings.unread_fields,
    reinforcement.train_run,
    reinforcement.open_trained,
    "anywidth train rl",
    "anywidth play",
    deployment.deployed_policy,
    examples.policy_examples,
)
TASKS: tuple[Task[Any], ...] = (CLASSIFICATION, SUPER_RESOLUTION, REINFORCEMENT)


def task_named(name: object) -> Task[Any]:
    """The task of a configuration."""
    for task in TASKS:
        if task.name == name:
            return task
    raise AnywidthError(
        f"a run of task {name!r}: expected {', '.join(task.name for task in TASKS)}; it may need a "
        "newer anywidth"
    )


def task_of(folder: Path) -> Task[Any]:
    return _task(Run.open(folder))


def check_same_task(folders: Sequence[Path]) -> None:
    """Refuses runs whose numbers say different things."""
    first = task_of(folders[0])
    for folder in folders[1:]:
        if (task := task_of(folder)) is not first:
            raise AnywidthError(
                f"{folders[0]} is a run of {first.name} and {folder} of {task.name}: name runs of "
                "one task"
            )


def settings_of(folder: Path) -> AnySettings:
    """The configuration a run was started with."""
    run = Run.open(folder)
    settings: AnySettings = run.read_settings(_task(run).settings)
    return settings


def _task(run: Run) -> Task[Any]:
    path = run.folder / "config.json"
    if "task" not in run.settings_data:
        raise AnywidthError(f"{path}: no task in it, so the run is damaged; {MEND}")
    try:
        return task_named(run.settings_data["task"])
    except AnywidthError as error:
        raise AnywidthError(f"{path}: {error}") from error


def open_trained(
    folder: Path,
    device: str = "auto",
    with_data: bool = True,
    data_dir: Path | None = None,
    eval_dir: Path | None = None,
) -> Trained:
    """A finished run of any task, with its data where it lies now."""
    settings = moved(settings_of(folder), data_dir, eval_dir)
    trained: Trained = task_named(settings.task).open(folder, device, with_data, settings)
    return trained


def open_only(task: Task[TrainedType], folder: Path, device: str, without_it: str) -> TrainedType:
    """A finished run of one task, without its data.

    Args:
        task: the one that the command is for.
        folder: of the run.
        device: auto, cpu, cuda or cuda:N.
        without_it: what a run of another task does not do, for the error.
    """
    found = task_of(folder)
    if found is not task:
        raise AnywidthError(
            f"{folder} is a run of {found.name}, which {without_it}; train one with: "
            f"{task.example}; this one is for: {found.use} {folder}"
        )
    return task.open(folder, device, False, None)
