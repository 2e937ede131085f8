"""From the arguments of `anywidth train` to the settings of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from anywidth.app.runs.settings import Settings, describe, from_json, override, with_fields
from anywidth.errors import AnywidthError, did_you_mean, errors_about

if TYPE_CHECKING:
    from anywidth.app.tasks.task_settings import TaskSettings

# Fields of a run that --resume may change, because they do not change the result.
CHANGEABLE = ("skip_corrupt", "workers", "model")


def split_arguments(arguments: list[str]) -> tuple[str | None, dict[str, str]]:
    """Split `RECIPE --learning-rate 0.2 --nonuniform --cutout=8` into a name and fields."""
    found: dict[str, str] = {}
    rest = list(arguments)
    name = rest.pop(0) if rest and not rest[0].startswith("--") else None
    while rest:
        option = rest.pop(0)
        if not option.startswith("--"):
            raise AnywidthError(
                f"{option!r} is not an option: expected --field value, after the recipe"
            )
        field, has_value, value = option[2:].partition("=")
        if not has_value:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif field.startswith("no-"):
                field, value = field[3:], "false"
            else:
                value = "true"
        found[field] = value
    return name, found


def new_settings(
    recipe_name: str | None,
    config: Path | None,
    changes: Mapping[str, str],
    *,
    own_options: Iterable[str],
    trust: bool,
) -> tuple[TaskSettings, list[str]]:
    """The settings of a new run: a recipe or a file, and the options on top; and those fields.

    Args:
        changes: field → text, from options.
        own_options: options of the command that are no fields, to name a close match.
        trust: allow the file to name code to import.
    """
    from anywidth.app.tasks.registry import recipe
    from anywidth.app.tasks.task_settings import refuse_code

    settings = recipe(recipe_name) if config is None else _from_file(config, recipe_name)
    changes = _channels_of_a_file(changes, settings)
    _check_known(changes, settings, own_options)
    again = {name.replace("-", "_") for name in changes}
    if config is not None and not trust and settings.named_code() not in again:
        refuse_code(settings, config)
    return override(settings, changes).anchored(), list(changes)


def _channels_of_a_file(changes: Mapping[str, str], settings: Settings) -> Mapping[str, str]:
    """`--channels FILE` is the field own_channels; `channels` may be a number of a task's own."""
    given = changes.get("channels", "")
    if "channels" not in changes or (hasattr(settings, "channels") and given.isdigit()):
        return changes
    others = {name: value for name, value in changes.items() if name != "channels"}
    return {**others, "own_channels": given}


def _from_file(path: Path, recipe_name: str | None) -> TaskSettings:
    """All settings, as in a run's config.json; or without "version", changes to a recipe."""
    from anywidth.app.tasks.registry import recipe, task_named
    from anywidth.files import read_json

    if not path.is_file():
        raise AnywidthError(
            f"--config {path}: there is no such file; expected a JSON file of settings, such as "
            "the config.json of a run"
        )
    data = read_json(path)
    with errors_about(f"--config {path}"):
        if "version" not in data:
            settings = recipe(recipe_name)
            task = data.pop("task", settings.task)
            if task != settings.task:
                raise AnywidthError(
                    f"settings of task {task!r}, but the recipe is of {settings.task!r}; name a "
                    "recipe of that task before --config"
                )
            return with_fields(settings, data)
        if recipe_name is not None:
            raise AnywidthError(
                f"it has all settings of a run, so the recipe {recipe_name!r} would have no "
                "effect; leave the recipe out"
            )
        return from_json(task_named(data.get("task")).settings, data)


def _check_known(given: Iterable[str], settings: Settings, own_options: Iterable[str]) -> None:
    """Refuse an option that is neither a field nor the command's own, and name the closest."""
    fields = [row.name.replace("_", "-") for row in describe(settings)]
    own = [name.replace("_", "-") for name in own_options]
    for name in (name.replace("_", "-") for name in given):
        if name not in fields:  # an option of the command may be a field of other tasks alone
            near = (
                "" if name in own else did_you_mean(name, [*fields, *own], 1, "did you mean --{}?")
            )
            hint = near or "--show lists all options"
            raise AnywidthError(f"no option --{name} for a run of {settings.task}; {hint}")


def refuse_changes(*values: object) -> None:
    """Refuse options beside --resume that would change the run."""
    if any(value is not None for value in values):
        raise AnywidthError(
            "--resume uses the settings of the run: leave out the other options (only --device, "
            "--data-dir, --eval-dir, --workers, --skip-corrupt and --wandb may change), or start a "
            "new run"
        )
