"""The results of a finished run: its spectrum as table, files and plots, and its report."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from anywidth._version import __version__
from anywidth.app.own_command import own_command
from anywidth.app.plain_text import visible
from anywidth.app.runs.metrics import read_metrics
from anywidth.app.runs.run import Run
from anywidth.app.runs.settings import to_json
from anywidth.app.showing.curves import curves_figure, has_curves
from anywidth.app.showing.figure_style import write_figure, write_figures
from anywidth.app.showing.plots import latency_figure, spectra_figure, timed_points
from anywidth.app.showing.report import write_report
from anywidth.app.tasks.registry import task_of
from anywidth.app.tasks.trained import Trained
from anywidth.distributed import device_name
from anywidth.errors import AnywidthError
from anywidth.files import read_json, write_json
from anywidth.measuring.spectra import Spectrum, spectrum
from anywidth.slimming.convert import plan_of
from anywidth.width import ChannelConfig, Width

_SPECTRUM = "spectrum.json"
CIRCUMSTANCES = {
    *("device", "data_dir", "workers", "threads", "cache_dir"),
    *("log_every", "validate_every", "checkpoint_every"),
}
"""Fields that do not change what is trained: a run may continue with others."""


def run_spectrum(
    trained: Trained, widths: Sequence[Width] | None = None, measure_latency: bool = True
) -> Spectrum:
    """Evaluate a run at many widths, and write spectrum.csv, .json and plots."""
    settings, chosen = trained.settings, list(widths or trained.widths)
    name, kind = settings.name, settings.method
    if kind == "i" and chosen != settings.widths:
        # An ordinary network, sliced to widths it was not trained for.
        name, kind = f"{name} {settings.width}, sliced", "control"
    found = spectrum(
        trained.model,
        trained.evaluate,
        [trained.own_width(width) for width in chosen],
        name=name,
        kind=kind,
        measure_latency=measure_latency,
    )
    pairs = zip(found.points, chosen, strict=True)
    points = tuple(
        replace(point, width=None if isinstance(width, ChannelConfig) else width)
        for point, width in pairs
    )
    found = replace(
        found, points=points, described=trained.metrics, measured_on=trained.measured_on
    )
    folder = trained.run.folder
    write_json(folder / _SPECTRUM, found.to_json())
    found.to_csv(folder / "spectrum.csv")
    trained.run.plots_folder.mkdir(exist_ok=True)
    plots = {"spectrum": found.metric()} | {f"spectrum_{name}": name for name in trained.drawn}
    for stem, metric in plots.items():
        draw = partial(spectra_figure, [found], metric, found.title)
        write_figures(trained.run.plots_folder / stem, draw)
    if timed_points(found):
        write_figures(trained.run.plots_folder / "latency", partial(latency_figure, found))
    return found


def saved_spectrum(run: Run) -> Spectrum:
    """The spectrum in the folder of a run, written by `anywidth spectrum`."""
    path = run.folder / _SPECTRUM
    if not path.exists():
        raise AnywidthError(
            f"{run.folder} has no spectrum yet: make it with {own_command('spectrum', run.folder)}"
        )
    try:
        found = Spectrum.from_json(read_json(path))
        shown = visible(found.name)  # it may be anyone's, and tables print it
        return replace(found, name=shown, described=task_of(run).trained.metrics)
    except AnywidthError as error:
        named = "" if str(path) in str(error) else f"{path}: "
        raise AnywidthError(
            f"{named}{error}; make it again: {own_command('spectrum', run.folder)}"
        ) from error


def earlier_spectrum(run: Run) -> Spectrum | None:
    """The existing spectrum; a damaged file counts as missing."""
    with contextlib.suppress(AnywidthError):
        return saved_spectrum(run)
    return None


def saved_spectra(runs: Sequence[Run]) -> list[Spectrum]:
    """The spectra of several runs, with distinct names.

    Spectra of one name and kind are one series in tables and plots: seeds, or the I-Nets of several
    widths. If such runs differ in anything else, the names of their folders are added.
    """
    spectra = [saved_spectrum(run) for run in runs]
    series: dict[tuple[str, str], dict[str, list[int]]] = {}
    for position, (run, one) in enumerate(zip(runs, spectra, strict=True)):
        alike = series.setdefault((one.name, one.kind), {})
        alike.setdefault(_recipe(run, one), []).append(position)
    for recipes in series.values():
        for positions in recipes.values():
            _check_differ([runs[position] for position in positions])
        if len(recipes) > 1:
            labels = _folder_names([runs[positions[0]].folder for positions in recipes.values()])
            for label, positions in zip(labels, recipes.values(), strict=True):
                others = f" and {len(positions) - 1} more" if len(positions) > 1 else ""
                for position in positions:
                    name = f"{spectra[position].name} ({label}{others})"
                    spectra[position] = replace(spectra[position], name=name)
    return spectra


def _check_differ(runs: Sequence[Run]) -> None:
    """Refuse to count one training as two seeds."""
    known: dict[tuple[object, object], Run] = {}
    for run in runs:
        key = run.settings_data.get("seed"), run.settings_data.get("width")
        if key in known:
            raise AnywidthError(
                f"{known[key].folder} and {run.folder} are the same training, seed {key[0]}: leave "
                "one out, or train one with another --seed"
            )
        known[key] = run


def _recipe(run: Run, found: Spectrum) -> str:
    """The settings that a run shares with the others of its series."""
    left_out = CIRCUMSTANCES | {"seed"} | ({"width"} if found.kind == "i" else set())
    fields = {name: value for name, value in run.settings_data.items() if name not in left_out}
    return json.dumps(fields, sort_keys=True)


def _folder_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or the whole paths if these are not distinct."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


# ---- the report ----------------------------------------------------------------------------------


def run_report(trained: Trained, baselines: Sequence[Run] = ()) -> Path:
    """Write report.html: one page with all results of a run, compared with other runs."""
    run = trained.run
    own, *others = saved_spectra([run, *baselines])
    rows = read_metrics(run.metrics_path) if run.metrics_path.exists() else []
    if has_curves(rows, trained.curves):
        run.plots_folder.mkdir(exist_ok=True)
        draw = partial(curves_figure, rows, trained.curves)
        write_figure(run.plots_folder / "training.png", draw)
    path = run.folder / "report.html"
    write_report(
        path,
        title=f"{trained.settings.name} on {trained.settings.trained_on}",
        run_summary={
            "settings": to_json(trained.settings),
            "versions": {
                "anywidth": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "device": device_name(next(trained.model.parameters()).device),
            },
        },
        spectrum=own,
        baselines=others,
        metrics=rows,
        curves=trained.curves,
        plan_text=_plan_text(trained),
        extra_sections=trained.sections(),
    )
    return path


def _plan_text(trained: Trained) -> str:
    """The printed plan; for a network of one width, with the multiply-adds of that width."""
    plan = plan_of(trained.model)
    if trained.settings.can_narrow(trained.model):
        return str(plan)
    head, heading, _ = str(plan).rpartition("\nwidth  multiply-adds\n")
    return f"{head}{heading}{trained.settings.width:<5}  {plan.macs(plan.full):,}"
