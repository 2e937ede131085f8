"""`anywidth study`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from anywidth.app.runs.metrics import read_metrics
from anywidth.app.runs.run import Run
from anywidth.app.showing.output import console, say
from anywidth.app.studies.definitions import MOBILENET_V1, MOBILENET_V2, STUDIES
from anywidth.app.studies.gathered import GATHERED, GatheredStudy, gather
from anywidth.app.studies.processes import available_cores, work_through
from anywidth.app.studies.reporting import write_study
from anywidth.app.studies.study_parts import Study
from anywidth.app.studies.study_recipes import study_recipe
from anywidth.app.studies.trainings import Job, jobs_of
from anywidth.distributed import local_device
from anywidth.errors import AnywidthError

_WIDTHS = "the widths of a study are those of the paper's tables; anywidth train takes any others"
# Fields that are not the recipe's to say, and why.
_SET_BY_STUDIES = {
    "method": "a study says itself which of its networks are US-, S- and I-Nets",
    "seed": "the seeds of a study count from 0; --seeds N says how many there are",
    "width": "a study says itself at which widths its I-Nets are trained",
    "low": _WIDTHS,
    "high": _WIDTHS,
    "switches": _WIDTHS,
}


def study(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Studies (--list prints them), or all."),
    ] = None,
    data: Annotated[
        str, typer.Option(help="bundled, cifar10, or folder (ImageNet's layout).")
    ] = "bundled",
    data_dir: Annotated[Path | None, typer.Option(help="Where the data lies.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Seeds of each training; if not given, as --list says, bundled 1."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Of every training.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of trainings and results; runs/study-DATA.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop cleanly after so long; repeat to go on.")
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(help="Trainings at once; if not given, one a core, or one on a GPU."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Only trainings with this in their name.")
    ] = None,
    only_training: Annotated[
        bool, typer.Option("--only-training", help="Train and measure; write no tables.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Of the recipe, not what is compared."),
    ] = None,
    list_studies: Annotated[
        bool, typer.Option("--list", help="Print what each study is and costs.")
    ] = False,
) -> None:
    """Repeat a table or figure of the paper: train what it needs, then write it beside the paper's.

    Trainings are shared between the studies of one --out, and finished ones are
    never repeated: Ctrl-C, a kill or --minutes lose nothing, and the same command
    goes on.

    Examples:

      anywidth study --list

      anywidth study main               bundled images, on a CPU

      anywidth study all --data cifar10 --data-dir DIR --parallel 8 --minutes 25
    """
    if list_studies:
        _print_studies()
        return
    if minutes is not None and minutes <= 0:
        raise AnywidthError(f"--minutes {minutes}: expected more than 0")
    deadline = None if minutes is None else time.time() + 60 * minutes
    folder = out or Path("runs") / f"study-{data}"
    wanted, gathered = _chosen(names or [])
    if wanted:
        counts = {one.name: _seed_count(one, seeds, data) for one in wanted}
        changes = _changes(fields or [], wanted)
        recipes = {
            network.name: study_recipe(data, network, data_dir, epochs, device, changes)
            for network in (MOBILENET_V1, MOBILENET_V2)
        }
        jobs = jobs_of(wanted, counts, recipes, folder)
        chosen = [job for job in jobs if only is None or only in job.name]
        if not chosen:
            names_of_jobs = ", ".join(job.name for job in jobs)
            raise AnywidthError(f"--only {only!r} is in no training's name: {names_of_jobs}")
        if data_dir is not None and not data_dir.is_dir() and any(job.missing() for job in chosen):
            raise AnywidthError(f"--data-dir {data_dir}: there is no such folder")
        if not work_through(chosen, _process_count(parallel, device), deadline, say):
            left = sum(bool(job.missing()) for job in chosen)
            say(f"Stopped with {len(chosen) - left} of {len(chosen)} trainings done.")
            say(f"Go on with: {_command()}")
            raise typer.Exit(130)
        if only_training:
            return
        for one in wanted:
            _write(one, jobs_of([one], counts, recipes, folder), counts[one.name], folder)
        if any(job.missing() for job in jobs):
            _say_errors(chosen)
    _gather_all(gathered, folder, is_asked_for=not wanted)


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


def _say_errors(jobs: Sequence[Job]) -> None:
    """How the trainings of a study ended that is not written, at both ends of their widths."""
    say("\nLast validation errors:")
    for job in jobs:
        path = Run.open(job.folder).metrics_path
        rows = read_metrics(path) if path.exists() else []
        ends = {"validation_error_max": "", "validation_error_min": " at the narrowest width"}
        last = [row for row in rows if not ends.keys().isdisjoint(row)][-1:]
        found = [
            f"{row[name]:.2f} %{of}" for row in last for name, of in ends.items() if name in row
        ]
        say(f"  {job.name}: {', '.join(found) or 'not recorded'}")


def _gather_all(gathered: Sequence[GatheredStudy], folder: Path, is_asked_for: bool) -> None:
    for one in gathered:
        try:
            page, found = gather(one, folder)
        except AnywidthError as error:
            if is_asked_for:
                raise
            say(f"\n{one.name}: left out, {error}")
            continue
        say(f"\n{one.name}: {page}")
        for finding in found:
            say(f"  {finding.verdict}: {finding.text}")


def _chosen(names: Sequence[str]) -> tuple[list[Study], list[GatheredStudy]]:
    known: list[Study | GatheredStudy] = [*STUDIES, *GATHERED]
    listed = f"{', '.join(one.name for one in known)}, or all"
    if not names:
        raise AnywidthError(f"which study? There are {listed}")
    for name in names:
        if name != "all" and name not in {one.name for one in known}:
            raise AnywidthError(f"no study {name!r}; there are {listed}")
    taken = [one for one in known if "all" in names or one.name in names]
    return (
        [one for one in taken if isinstance(one, Study)],
        [one for one in taken if isinstance(one, GatheredStudy)],
    )


def _seed_count(one: Study, seeds: int | None, data: str) -> int:
    if seeds is not None and seeds < 1:
        raise AnywidthError(f"--seeds {seeds}: expected at least 1")
    return seeds or (1 if data == "bundled" else one.seeds)


def _process_count(parallel: int | None, device: str) -> int:
    if parallel is not None and parallel < 1:
        raise AnywidthError(f"--parallel {parallel}: expected at least 1")
    on_gpu = local_device(device).type == "cuda"
    return parallel or (1 if on_gpu else available_cores())


def _changes(fields: Sequence[str], wanted: Sequence[Study]) -> dict[str, str]:
    """What `--set` says, without what would make the labels of a table false."""
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
                    "trainings, and its labels would no longer be true"
                )
        changes[given] = value
    return changes


def _command() -> str:
    return shlex.join(["anywidth", *sys.argv[1:]])


def _print_studies() -> None:
    before: dict[str, None] = {}
    for one in STUDIES:
        names = [training.name for training in one.trainings]
        shared = sum(name in before for name in names)
        before |= dict.fromkeys(names)
        count = f"{len(names)} training{'s' * (len(names) > 1)} a seed"
        if shared:
            some = "" if shared == len(names) else f"{shared} of them "
            count += f", {some}shared with those above"
        seeds = f"{one.seeds} seed{'s' * (one.seeds > 1)} unless bundled"
        minutes = [f"{value:g} minutes a seed ({where})" for where, value in one.minutes.items()]
        _print_study(one, "; ".join([count, seeds, *minutes]))
    for gathered in GATHERED:
        _print_study(gathered, "no training: gathers what benchmarks/ recorded")
    say("The H200 trained eight networks at once, under MPS.")
    say("`anywidth study all` runs everything; what is shared is trained once.")


def _print_study(one: Study | GatheredStudy, cost: str) -> None:
    console.print(f"[bold]{one.name}[/], {one.place}", highlight=False)
    for line in (one.compares, cost):
        console.print(Padding(Text(line), (0, 0, 0, 4), expand=False))
    console.print()
