"""`anywidth train`."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from anywidth.app.runs.run import Run
from anywidth.app.runs.settings import Settings, check_read, describe, override
from anywidth.app.showing.output import console, say
from anywidth.app.showing.spectrum_tables import spectrum_table
from anywidth.app.tasks.registry import all_recipes, recipe, settings_of, task_named
from anywidth.app.tasks.results import run_report, run_spectrum
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.distributed import barrier, local_device, rank, start_processes, stop_processes
from anywidth.errors import AnywidthError

# Of a run under way, what has to do with its circumstances and not with what is trained.
CHANGEABLE = ("skip_corrupt", "workers")


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [--FIELD VALUE]...",
            help="A recipe (--list prints them) and fields of its configuration to change.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the new run; if not given, runs/RECIPE-TIME.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with an interrupted run, from its last checkpoint.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training images (of rl: each roll-out).")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images (of rl: observations) a step, all ranks.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the data lies; with --resume, where it lies now.")
    ] = None,
    eval_dir: Annotated[
        Path | None, typer.Option(help="Super-resolution: pictures to evaluate on.")
    ] = None,
    report: Annotated[
        bool, typer.Option(help="Then calibrate, draw the spectrum and write the report.")
    ] = True,
    show: Annotated[
        bool, typer.Option("--show", help="Print every field of the configuration and stop.")
    ] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="Print the recipes.")] = False,
) -> None:
    """Train one network for all widths (or a baseline), then calibrate it and draw its spectrum.

    Any field of the configuration can be given as an option, such as
    --learning-rate 0.2 or --method i --width 0.25; --show lists them all, with
    the values they take. Ctrl-C stops after the present step and leaves a run
    that --resume goes on with; beside it, the places of data, --device, --workers
    and --skip-corrupt may change.

    Examples:

      anywidth train                    bundled images, minutes on a CPU

      anywidth train cifar10_mobilenet_v1 --data-dir DIR --out runs/cifar

      anywidth train sr                 super-resolution, bundled pictures

      anywidth train sr_wdsr --data-dir PICTURES --eval-dir SETS --out runs/wdsr

      anywidth train rl                 a game, learned in minutes on a CPU

      anywidth train rl_breakout --out runs/breakout

      anywidth train --resume runs/cifar

      torchrun --nproc-per-node 8 -m anywidth train imagenet_us_mobilenet_v1
      --data-dir DIR
    """
    if list_recipes:
        _print_recipes()
        return
    name, fields = _split_arguments(arguments or [])
    if resume is not None:
        _refuse_changes(name, out, epochs, batch_size, seed, *_unchangeable(fields))
        places = {"device": device, "data-dir": data_dir, "eval-dir": eval_dir}
        changes = {field: str(value) for field, value in places.items() if value is not None}
        now = settings_of(resume).moved(data_dir=data_dir, eval_dir=eval_dir)
        settings = override(now, fields)
        if device is not None:
            settings = override(settings, {"device": device})
        folder, go_on = resume, _resume_command(resume, {**changes, **fields})
    else:
        name = name or next(iter(all_recipes()))
        numbers = {"epochs": epochs, "batch_size": batch_size, "seed": seed}
        named = {**numbers, "device": device, "data_dir": data_dir, "eval_dir": eval_dir}
        changes = {field: str(value) for field, value in named.items() if value is not None}
        settings = override(recipe(name), {**fields, **changes}).anchored()
        folder = out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        go_on = _resume_command(folder)
    if show:
        _print_fields(settings)
        return
    if resume is None:
        check_read(settings, [*fields, *changes], settings.unread())
    start_processes(local_device(settings.device))
    try:
        if not _train(settings, folder, is_new=resume is None):
            raise KeyboardInterrupt
        if report:
            finish(folder, settings)
    except KeyboardInterrupt:
        if not (folder / "config.json").is_file():
            raise
        if rank() == 0:
            say(f"Stopped. Go on with: {go_on}")
        raise typer.Exit(130) from None
    finally:
        stop_processes()


def _train(settings: TaskSettings, folder: Path, is_new: bool) -> bool:
    if rank() == 0:
        run = Run.create(folder, settings) if is_new else Run.open(folder, writing=True)
        say(f"Run: {folder}")
    barrier()
    if rank() != 0:
        run = Run.open(folder)
    if run.finished:
        if rank() == 0:
            say("Training has finished already.")
        return True
    try:
        return task_named(settings.task).train(run, settings)
    except Exception:
        if is_new and rank() == 0:
            _discard(run)
        raise


def _discard(run: Run) -> None:
    """Takes back a run that did not begin, so that the command can be given again as it was."""
    if [path.name for path in run.folder.iterdir()] == ["config.json"]:
        (run.folder / "config.json").unlink()
        run.folder.rmdir()


def finish(folder: Path, settings: TaskSettings) -> None:
    """Calibrates all widths of a trained run, draws its spectrum and writes its report.

    All ranks calibrate; the first one goes on alone.
    """
    trained = task_named(settings.task).open(folder, settings.device, True, settings)
    trained.complete_statistics(trained.widths)
    is_first = rank() == 0
    stop_processes()
    if not is_first:
        return
    console.print(spectrum_table(run_spectrum(trained)))
    say(f"Report: {run_report(trained)}")


def _refuse_changes(*values: object) -> None:
    if any(value is not None for value in values):
        raise AnywidthError(
            "--resume goes on with the run's own configuration: leave out the other options "
            "(--device, --data-dir, --eval-dir, --workers and --skip-corrupt may change), or start "
            "a new run"
        )


def _unchangeable(fields: dict[str, str]) -> list[str]:
    return [field for field in fields if field.replace("-", "_") not in CHANGEABLE]


def _resume_command(folder: Path, options: dict[str, str] | None = None) -> str:
    given = [f"--{name}={value}" for name, value in (options or {}).items()]
    return shlex.join(["anywidth", "train", "--resume", str(folder), *given])


def _split_arguments(arguments: list[str]) -> tuple[str | None, dict[str, str]]:
    """`RECIPE --learning-rate 0.2 --nonuniform --cutout=8` as a name, and fields with texts."""
    found: dict[str, str] = {}
    rest = list(arguments)
    name = rest.pop(0) if rest and not rest[0].startswith("--") else None
    while rest:
        option = rest.pop(0)
        if not option.startswith("--"):
            raise AnywidthError(
                f"{option!r} is not an option: expected --field value (a recipe comes first)"
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


def _print_recipes() -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for name, found in all_recipes().items():
        table.add_row(name, Text((found.__doc__ or "").strip().splitlines()[0]))
    console.print(table)


def _print_fields(settings: Settings) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("option", "value", "meaning"):
        table.add_column(column)
    for row in describe(settings):
        meaning = f"{row.help}; {row.allowed}" if row.allowed else row.help
        table.add_row(f"--{row.name.replace('_', '-')}", Text(row.value), Text(meaning))
    console.print(table)
