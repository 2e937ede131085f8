"""A search on a finished run: its options, the files it writes, and how far to trust it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from anywidth.app.runs.folder_lock import FolderLock, lock_folder
from anywidth.app.showing.figure_style import write_figures
from anywidth.app.showing.output import note
from anywidth.app.showing.search_results import search_figure
from anywidth.app.tasks.trained import Judging, Trained
from anywidth.distributed import gathered, rank
from anywidth.errors import AnywidthError
from anywidth.files import make_folder, write_json
from anywidth.searching.budgets import Budget, shown_cost
from anywidth.searching.channel_search import search
from anywidth.searching.found import SearchResult
from anywidth.searching.latency_table import LatencyTable, measure_latencies
from anywidth.slimming.convert import plan_of

_NOTES = "notes.json"
TABLE_FILE = "latencies.json"
Result = TypeVar("Result")


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search on a run, with budgets of one kind, that writes to the folder `out`.

    Args:
        seed: of everything random, also of the images that judge.
        resume: continue with the notes in `out`.
        latencies: a latency table; if not given, the one in `out`, or one measured now.
        other_device: the table may be of another device.
    """

    budgets: Sequence[Budget]
    out: Path
    method: Literal["greedy", "evolution"] = "greedy"
    seed: int = 0
    resume: bool = False
    latencies: Path | None = None
    other_device: bool = False


@dataclass(frozen=True)
class Searched:
    """A result and its circumstances; `remarks` say how far it can be trusted."""

    result: SearchResult
    judging: Judging
    remarks: list[str]
    latencies: LatencyTable | None


def search_run(trained: Trained, options: SearchOptions) -> Searched:
    """Search, and write what was found: search.json, channels-*.json, search.png and .svg."""
    judging = trained.judging(options.seed)
    if len(plan_of(trained.model).elastic()) < 2:
        raise AnywidthError(
            f"{trained.run.folder}: all channels of this network follow one group, so it has "
            "nothing but uniform widths; train it with --nonuniform"
        )
    remarks = trust_remarks(trained, judging)
    _lock = _on_first_rank(lambda: _prepared(options))
    latencies = None
    if options.budgets[0].kind == "milliseconds":
        latencies = _latencies(trained, options)
    result = search(
        trained.model,
        judging.evaluate,
        options.budgets,
        calibration=judging.calibration,
        method=options.method,
        metric=judging.metric,
        latencies=latencies,
        seed=options.seed,
        notes=options.out / _NOTES,
        progress=rank() == 0,
    )
    searched = Searched(result, judging, remarks, latencies)
    if rank() == 0:
        _write(trained, searched, options.out)
    return searched


def trust_remarks(trained: Trained, judging: Judging) -> list[str]:
    """How far the answers of a search can be trusted; nothing if as far as possible."""
    found = []
    if not trained.settings.nonuniform:
        found.append(
            "The run was not trained with --nonuniform: layers of different widths never worked "
            "together in training. Trust differences between configurations little, and train "
            "what is found: anywidth train --channels FILE."
        )
    if not judging.is_held_out:
        found.append(
            f"Judged by {judging.judged_on}, which favours wide layers. Train with --held-out 0.1 "
            "to keep images for the search."
        )
    return found


def channels_file(budget: Budget) -> str:
    """Such as channels-150M.json, channels-5ms.json or channels-1M-parameters.json."""
    # Budgets that tables round alike have files of their own.
    number, word = shown_cost(budget.kind, budget.amount, digits=12).split(" ", 1)
    ending = {"macs": "", "milliseconds": word, "parameters": f"-{word}"}[budget.kind]
    return f"channels-{number}{ending}.json"


def _on_first_rank(work: Callable[[], Result]) -> Result | None:
    """What the first rank returns, None on others; its error is raised on all of them."""
    found, refusal = None, None
    if rank() == 0:
        try:
            found = work()
        except AnywidthError as error:
            refusal = str(error)
    refusal = gathered(refusal)[0]
    if refusal is not None:
        raise AnywidthError(refusal)
    return found


def _prepared(options: SearchOptions) -> FolderLock | None:
    """Locks the folder, with notes for --resume alone."""
    make_folder(options.out)
    try:
        lock = lock_folder(options.out)
    except AnywidthError as error:
        raise AnywidthError(
            f"{options.out}: another search is writing into this folder; wait until it ends, or "
            "give another one with --out"
        ) from error
    notes = options.out / _NOTES
    if options.resume and not notes.exists():
        raise AnywidthError(
            f"--resume: there are no notes of a search in {options.out}; leave out --resume, or "
            "give its folder with --out"
        )
    if not options.resume:
        notes.unlink(missing_ok=True)
    return lock


def _latencies(trained: Trained, options: SearchOptions) -> LatencyTable:
    """The table that was given, or the one of this device in the folder, or a new one."""
    if options.latencies is not None:
        return LatencyTable.load(
            options.latencies, trained.model, other_device=options.other_device
        )
    path = options.out / TABLE_FILE

    def measured_if_needed() -> None:
        try:
            LatencyTable.load(path, trained.model)
        except AnywidthError as error:
            if path.exists():
                note(f"{error}; measuring again.")
            measure_latencies(trained.model).save(path)

    _on_first_rank(measured_if_needed)
    return LatencyTable.load(path, trained.model)


def _write(trained: Trained, searched: Searched, out: Path) -> None:
    result = searched.result
    for found in result.found:
        write_json(out / channels_file(found.budget), found.best.channels.to_json())
    about = {
        "run": str(trained.run.folder),
        "judged_on": searched.judging.judged_on,
        "remarks": searched.remarks,
        "device": None if searched.latencies is None else searched.latencies.device,
    }
    write_json(out / "search.json", {**result.to_json(), "about": about})
    label = trained.metrics[result.metric].label
    write_figures(out / "search", lambda: search_figure(result, label, trained.settings.name))
