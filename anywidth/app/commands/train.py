"""`anywidth train`."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anywidth.app.commands.training_options import (
    CHANGEABLE,
    new_settings,
    refuse_changes,
    split_arguments,
)
from anywidth.app.interrupts import exit_code
from anywidth.app.own_command import own_command
from anywidth.app.runs.settings import Settings, check_read, describe, override
from anywidth.app.showing.output import console, note, say
from anywidth.app.tasks.command_options import Trust
from anywidth.errors import AnywidthError
from anywidth.measuring.heartbeat import working

if TYPE_CHECKING:
    from anywidth.app.runs.run import Run
    from anywidth.app.tasks.task_settings import TaskSettings


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [--FIELD VALUE]...",
            help="The name of a recipe, and settings to change; the first recipe if not given.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the new run; if not given, runs/RECIPE-TIME.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue an interrupted run from its last checkpoint.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Read settings from a JSON file, such as a run's config.json; options override it."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples per step, of all processes together.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    device: Annotated[str | None, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data; with --resume, where it is now.")
    ] = None,
    eval_dir: Annotated[
        Path | None, typer.Option(help="Super-resolution: folder of evaluation pictures.")
    ] = None,
    trust: Trust = False,
    report: Annotated[
        bool,
        typer.Option(help="After training, measure all widths and write the report."),
    ] = True,
    wandb: Annotated[
        bool,
        typer.Option("--wandb", help="Log to Weights & Biases too; needs the package wandb."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Measure a few steps, print the expected time and memory, and write nothing.",
        ),
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print all settings and stop.")] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="Print the recipes.")] = False,
) -> None:
    """Train one network for all widths, measure it at each width, and write a report.

    A recipe is a set of settings with a name; --list prints all recipes. Every
    setting is an option, such as --learning-rate 0.2, and --show lists them.
    Folders of images are checked first, and all damaged files are named.
    Ctrl-C stops after the current step and saves a checkpoint; --resume goes on
    from there. With --resume, only --data-dir, --eval-dir, --device, --workers,
    --skip-corrupt and --wandb may change.

    Examples with bundled data, minutes on a CPU:

      anywidth train                    classify images

      anywidth train sr                 enlarge pictures

      anywidth train rl                 play a game

    With your own data:

      anywidth train cifar10_mobilenet_v1 --data-dir DIR --out runs/cifar

      anywidth train --data folder --data-dir PHOTOS --image-size 96

      anywidth train sr_wdsr --data-dir PICTURES --eval-dir SETS

    How long will it take, and will it fit into memory?

      anywidth train cifar10_mobilenet_v1 --data-dir DIR --dry-run

    Continue, or repeat with other settings:

      anywidth train --resume runs/cifar

      anywidth train --config runs/cifar/config.json --seed 1

      anywidth train --method i --width 0.25      a baseline for one width

      anywidth train --channels runs/us/search/channels-150M.json

    On eight GPUs:

      torchrun --nproc-per-node 8 -m anywidth train imagenet_us_mobilenet_v1
      --data-dir DIR
    """
    from anywidth.app.runs.run import Run
    from anywidth.app.tasks.registry import all_recipes, settings_of
    from anywidth.distributed import local_device, rank, start_processes, stop_processes

    if list_recipes:
        _print_recipes()
        return
    if wandb:
        from anywidth.app.runs.metrics import check_wandb

        check_wandb()
    name, fields = split_arguments(arguments or [])
    own: dict[str, object] = {"epochs": epochs, "batch_size": batch_size, "seed": seed}
    own |= {"device": device, "data_dir": data_dir, "eval_dir": eval_dir}
    changes = {field: str(value) for field, value in own.items() if value is not None}
    if resume is not None:
        if dry_run:
            raise AnywidthError("--dry-run is for a new run: leave out --resume")
        others = [field for field in fields if field.replace("-", "_") not in CHANGEABLE]
        refuse_changes(name, out, config, epochs, batch_size, seed, *others)
        again = fields.pop("model", None)
        if again != Run.open(resume).settings_data.get("model", again):
            refuse_changes(again)
        now = settings_of(resume, trust=trust, model=again)
        settings = override(now.moved(data_dir=data_dir, eval_dir=eval_dir), fields)
        if device is not None:
            settings = override(settings, {"device": device})
        folder, changes = resume, {**changes, **fields}
    else:
        settings, given = new_settings(
            name,
            config,
            {**fields, **changes},
            own_options=inspect.signature(train).parameters,
            trust=trust,
        )
        name = name or (next(iter(all_recipes())) if config is None else settings.task)
        folder = out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if show:
        _print_fields(settings)
        return
    if resume is None:
        check_read(settings, given, settings.unread())
    start_processes(local_device(settings.device))
    try:
        if dry_run:
            _rehearse(settings, folder)
            return
        if not _train(settings, folder, is_new=resume is None, wandb=wandb):
            raise KeyboardInterrupt
        if report:
            finish(folder, settings)
        elif rank() == 0:
            _say_next(folder, settings)
    except KeyboardInterrupt:
        if not (folder / "config.json").is_file():
            raise
        if rank() == 0:
            options = [f"--{name.replace('_', '-')}={text}" for name, text in changes.items()]
            given = [] if resume is None else options
            again = own_command("train", "--resume", folder, *given, *settings.allowance)
            say(f"Stopped. Continue with: {again}")
        raise typer.Exit(exit_code()) from None
    finally:
        stop_processes()


def _rehearse(settings: TaskSettings, folder: Path) -> None:
    from anywidth.app.runs.dry_run import DryRun
    from anywidth.app.tasks.registry import task_named
    from anywidth.distributed import rank

    run = DryRun(folder, settings)
    with working("loading the data and preparing the network"):
        task_named(settings.task).train(run, settings)
    if rank() == 0:
        say(f"Dry run of {settings.name} on {settings.trained_on}; nothing was written.")
        say(str(run.forecast))


def _train(settings: TaskSettings, folder: Path, is_new: bool, wandb: bool) -> bool:
    from anywidth.app.runs.run import Run
    from anywidth.app.tasks.registry import task_named
    from anywidth.distributed import barrier, rank

    if rank() == 0:
        run = Run.create(folder, settings) if is_new else Run.open(folder, writing=True)
        run.uses_wandb = wandb
        say(f"Run: {folder}")
    barrier()
    if rank() != 0:
        run = Run.open(folder)
    if run.finished:
        if rank() == 0:
            say("Training is already finished.")
        return True
    try:
        with working("loading the data and preparing the network"):
            return task_named(settings.task).train(run, settings)
    except Exception:
        if is_new and rank() == 0:
            _discard(run)
        raise


def _discard(run: Run) -> None:
    """Remove a run that did not start, so that the same command can be repeated."""
    files = list(run.folder.iterdir())
    if {path.name for path in files} <= {"config.json", "data.json"}:
        for path in files:
            path.unlink()
        run.folder.rmdir()


def _say_next(folder: Path, settings: TaskSettings) -> None:
    """Say what to do with a trained run that has no report yet."""
    say("Trained. To measure all widths and draw the spectrum:")
    say(f"  {own_command('spectrum', folder, *settings.allowance)}")
    say("Then, for a page with all results:")
    say(f"  {own_command('report', folder, *settings.allowance)}")


def finish(folder: Path, settings: TaskSettings) -> None:
    """Calibrate all widths of a trained run, draw its spectrum and write its report.

    All ranks calibrate; the rest is done by the first rank.
    """
    from anywidth.app.runs.folder_lock import lock_folder
    from anywidth.app.showing.spectrum_tables import spectrum_table
    from anywidth.app.tasks.registry import task_named
    from anywidth.app.tasks.results import run_report, run_spectrum
    from anywidth.distributed import rank, stop_processes

    _lock = lock_folder(folder, wait=True) if rank() == 0 else None  # a run has one writer
    with working("opening the trained network"):
        trained = task_named(settings.task).open(folder, settings.device, True, settings)
    trained.complete_statistics(trained.widths)
    is_first = rank() == 0
    stop_processes()
    if not is_first:
        return
    console.print(spectrum_table(run_spectrum(trained)))
    with working("drawing the report"):
        page = run_report(trained)
    say(f"Report: {page}")
    bundle = folder / "net.anywidth"
    several = len(trained.widths) > 1
    say(f"To open a page {'with a slider over all widths' if several else 'to try it'}:")
    say(f"  {own_command('export', folder, '--out', bundle, *settings.allowance)}")
    say(f"  {own_command('serve', bundle)}")


def _print_recipes() -> None:
    from rich.table import Table
    from rich.text import Text

    from anywidth.app.tasks.registry import all_recipes

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for name, found in all_recipes().items():
        table.add_row(name, Text((found.__doc__ or "").strip().splitlines()[0]))
    console.print(table)
    note("\nUS is universally slimmable: one network for all widths.")
    note("Train one with: anywidth train NAME (--show prints its settings)")


def _print_fields(settings: Settings) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("option", "value", "meaning"):
        table.add_column(column)
    for row in describe(settings):
        meaning = f"{row.help}; {row.allowed}" if row.allowed else row.help
        table.add_row(f"--{row.name.replace('_', '-')}", Text(row.value), Text(meaning))
    console.print(table)
