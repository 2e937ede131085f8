"""What `anywidth study` does."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import typer
from rich.padding import Padding
from rich.text import Text

from anywidth.app.interrupts import exit_code
from anywidth.app.runs.metrics import read_metrics
from anywidth.app.runs.run import Run
from anywidth.app.showing.output import console, say
from anywidth.app.studies.definitions import STUDIES
from anywidth.app.studies.processes import available_cores, work_through
from anywidth.app.studies.reporting import write_study
from anywidth.app.studies.study_parts import Study
from anywidth.app.studies.study_recipes import DATA, study_recipe
from anywidth.app.studies.trainings import Job, jobs_of
from anywidth.distributed import local_device
from anywidth.errors import AnywidthError

_WIDTHS = "a study uses the widths of the paper's tables; use anywidth train for other widths"
# Fields that `--set` cannot change, and why.
_SET_BY_STUDIES = {
    "method": "a study sets the methods of its networks itself",
    "seed": "the seeds of a study are 0, 1, ...; use --seeds N for their number",
    "width": "a study sets the widths of its I-Nets itself",
    "low": _WIDTHS,
    "high": _WIDTHS,
    "switches": _WIDTHS,
}


def run_studies(
    names: Sequence[str] | None,
    data: str,
    data_dir: Path | None,
    *,
    seeds: int | None,
    epochs: int | None,
    out: Path | None,
    minutes: float | None,
    parallel: int | None,
    only: str | None,
    only_training: bool,
    device: str,
    fields: Sequence[str] | None,
) -> None:
    """Train what the studies need, and write their pages; the arguments are the options."""
    if minutes is not None and minutes <= 0:
        raise AnywidthError(f"--minutes {minutes}: expected more than 0")
    deadline = None if minutes is None else time.time() + 60 * minutes
    folder = out or Path("runs") / f"study-{data}"
    wanted = _chosen(names or (), data)
    counts = {one.name: seeds or (1 if data == "bundled" else one.seeds) for one in wanted}
    changes = _changes(fields or (), wanted)
    recipes = {
        network.name: study_recipe(
            data, network, data_dir, epochs, device, _of_task(changes, one, wanted)
        )
        for one in wanted
        for network in one.networks
    }
    jobs = jobs_of(wanted, counts, recipes, folder)
    chosen = [job for job in jobs if only is None or only in job.name]
    if not chosen:
        names_of_jobs = ", ".join(job.name for job in jobs)
        raise AnywidthError(f"--only {only!r}: no training has this in its name: {names_of_jobs}")
    if data_dir is not None and not data_dir.is_dir() and any(job.missing() for job in chosen):
        raise AnywidthError(f"--data-dir {data_dir}: there is no such folder")
    at_once = 1 if local_device(device).type == "cuda" else available_cores()
    if not work_through(chosen, parallel or at_once, deadline, say):
        left = sum(bool(job.missing()) for job in chosen)
        say(f"Stopped with {len(chosen) - left} of {len(chosen)} trainings done.")
        say(f"Go on with: {_command()}")
        is_late = deadline is not None and time.time() >= deadline
        raise typer.Exit(130 if is_late else exit_code())
    if only_training:
        return
    for one in wanted:
        _write(one, jobs_of([one], counts, recipes, folder), counts[one.name], folder)
    if any(job.missing() for job in jobs):
        _say_validation(chosen)


def _write(one: Study, jobs: Sequence[Job], seeds: int, folder: Path) -> None:
    missing = [job.name for job in jobs if job.missing()]
    if missing:
        count = f"{len(missing)} training{'s are' if len(missing) > 1 else ' is'} missing"
        say(f"{one.name}: not written, {count}: {', '.join(missing)}")
        return
    page, found = write_study(one, jobs, seeds, folder, _command())
    say(f"\n{one.name}: {page}")
    for finding in found:
        say(f"  {finding.verdict}: {finding.text}")


def _say_validation(jobs: Sequence[Job]) -> None:
    """Print the last validation of an unwritten study's trainings."""
    say("\nLast validation:")
    for job in jobs:
        path = Run.open(job.folder).metrics_path
        rows = read_metrics(path) if path.exists() else []
        metrics = job.task.trained.metrics
        last: dict[str, float] = {}
        for row in rows:
            values = {name: value for name, value in row.items() if _is_validation(name, metrics)}
            last = values or last
        found = [f"{name.replace('_', ' ')} {value:.2f}" for name, value in last.items()]
        say(f"  {job.name}: {', '.join(found) or 'not recorded'}")


def _is_validation(column: str, metrics: Collection[str]) -> bool:
    return column.startswith("validation_") or column.partition("/")[0] in metrics


def _chosen(names: Sequence[str], data: str) -> list[Study]:
    """The studies of these names; `all` are those that this data is for."""
    known = {one.name: one for one in STUDIES}
    listed = f"{', '.join(known)}, or all"
    if not names:
        raise AnywidthError(f"no study given: expected one of {listed}")
    every = dict.fromkeys(name for of_task in DATA.values() for name in of_task)
    if data not in every:
        raise AnywidthError(f"--data {data!r}: expected one of {', '.join(every)}")
    for name in names:
        if name == "all":
            continue
        if name not in known:
            raise AnywidthError(f"no study {name!r}: expected one of {listed}")
        possible = DATA[known[name].task.name]
        if data not in possible:
            raise AnywidthError(
                f"the study {name} has no --data {data}: expected one of {', '.join(possible)}"
            )
    return [
        one
        for one in STUDIES
        if one.name in names or ("all" in names and data in DATA[one.task.name])
    ]


def _of_task(changes: Mapping[str, str], one: Study, wanted: Sequence[Study]) -> dict[str, str]:
    """The changes for the fields that a study's task has; refused later if no study has them."""
    others = {field for other in wanted for field in _fields(other)} - _fields(one)
    return {name: text for name, text in changes.items() if name.replace("-", "_") not in others}


def _fields(one: Study) -> set[str]:
    return {field.name for field in dataclasses.fields(one.task.settings)}


def _changes(fields: Sequence[str], wanted: Sequence[Study]) -> dict[str, str]:
    """The changes of `--set`; refuses fields that the labels of a table name."""
    changes = {}
    for text in fields:
        given, equals, value = text.partition("=")
        if not equals:
            raise AnywidthError(f"--set {text!r}: expected FIELD=VALUE, such as batch_size=128")
        name = given.replace("-", "_")
        if name in _SET_BY_STUDIES:
            raise AnywidthError(f"--set {text}: {_SET_BY_STUDIES[name]}")
        for one in wanted:
            if name in one.varied:
                raise AnywidthError(
                    f"--set {text}: the study {one.name} sets {name} itself for some of its "
                    "trainings; leave it out"
                )
        changes[given] = value
    return changes


def _command() -> str:
    return shlex.join(["anywidth", *sys.argv[1:]])


def print_studies() -> None:
    before: dict[str, None] = {}
    for one in STUDIES:
        names = [training.name for training in one.trainings]
        shared = sum(name in before for name in names)
        before |= dict.fromkeys(names)
        count = f"{len(names)} training{'s' * (len(names) > 1)} per seed"
        if shared:
            some = "" if shared == len(names) else f"{shared} of them "
            count += f", {some}shared with studies above"
        seeds = f"{one.seeds} seed{'s' * (one.seeds > 1)} unless bundled"
        minutes = [f"{value:g} minutes per seed ({where})" for where, value in one.minutes.items()]
        data = f"--data {' or '.join(DATA[one.task.name])}"
        console.print(f"[bold]{one.name}[/], {one.place}", highlight=False)
        for line in (one.compares, "; ".join([count, seeds, *minutes, data])):
            console.print(Padding(Text(line), (0, 0, 0, 4), expand=False))
        console.print()
    say("The H200 trained eight networks at once, under MPS.")
    say("`anywidth study all` runs every study of its data; shared networks are trained once.")
