"""What a finished run shows: its spectrum in a table, in files and in plots, and its report."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from anywidth._version import __version__
from anywidth.app.runs.metrics import read_metrics
from anywidth.app.runs.run import Run
from anywidth.app.runs.settings import to_json
from anywidth.app.showing.curves import has_curves, plot_curves
from anywidth.app.showing.plots import plot_spectra
from anywidth.app.showing.report import Section, write_report
from anywidth.app.showing.spectrum_tables import shown_metrics
from anywidth.distributed import device_name
from anywidth.errors import AnywidthError
from anywidth.files import read_json, write_json
from anywidth.measuring.spectra import Spectrum, spectrum
from anywidth.slimming.convert import plan_of
from anywidth.slimming.norm_statistics import norm_records
from anywidth.training.calibration import calibrated_widths, is_full_width_new
from anywidth.width import Width

_SPECTRUM = "spectrum.json"
# Fields in which runs of one series may differ: chance, and where and how often, not what.
_CIRCUMSTANCES = {
    *("seed", "device", "data_dir", "workers", "threads", "cache_dir"),
    *("log_every", "validate_every", "checkpoint_every"),
}


class Trained(Protocol):
    """What every task's finished run can do."""

    @property
    def run(self) -> Run: ...

    @property
    def settings(self) -> Any: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def name(self) -> str: ...

    @property
    def widths(self) -> list[float]: ...

    def calibrate(
        self, widths: Sequence[Width], samples: int | None = None, method: str | None = None
    ) -> int: ...

    def evaluate(self, model: nn.Module) -> dict[str, float]: ...


# ---- widths as users and as networks know them ---------------------------------------------------


def only_width(trained: Trained) -> float | None:
    """The one width of an I-Net that can run at no other; None for all other runs.

    Its network was built for that width, and is run whole: 1.0 to the network itself. An I-Net of
    full width can be sliced to others, as a control.
    """
    widths = plan_of(trained.model).widths
    is_alone = trained.settings.method == "i" and widths.low == widths.high
    return float(trained.settings.width) if is_alone else None


def network_widths(trained: Trained, given: Sequence[float] | None) -> list[float]:
    """What the widths a user gives are to the network; those of a spectrum if none are given."""
    if given is None:
        return trained.widths
    only = only_width(trained)
    if only is None:
        return list(given)
    for width in given:
        if not math.isclose(width, only):
            raise AnywidthError(
                f"width {width}: {trained.run.folder} was trained at width {only} alone; leave "
                "the width out, or train a US-Net"
            )
    return trained.widths


def network_width(trained: Trained, given: float | None) -> float:
    """What the width a user gives is to the network; the widest if none is given."""
    return max(network_widths(trained, None if given is None else [given]))


def shown_width(trained: Trained, width: float) -> float:
    """What a user knows one of the network's widths as."""
    only = only_width(trained)
    return width if only is None else only


# ---- statistics ----------------------------------------------------------------------------------


def missing_statistics(trained: Trained, widths: Sequence[float]) -> list[float]:
    """Those of the widths that have to be calibrated before they can be evaluated."""
    if not has_statistics(trained.model):
        return []
    plan = plan_of(trained.model)
    known = {plan.resolve(width) for width in calibrated_widths(trained.model)}
    if is_full_width_new(trained.model):
        known.discard(plan.full)
    return [width for width in widths if plan.resolve(width) not in known]


def check_calibrated(trained: Trained, width: float) -> None:
    """Refuses one of the network's widths that has no statistics yet."""
    if missing_statistics(trained, [width]):
        shown = shown_width(trained, width)
        raise AnywidthError(
            f"no statistics for width {shown}: calibrate it first with: "
            f"anywidth calibrate {trained.run.folder} --widths {shown}"
        )


def has_statistics(model: nn.Module) -> bool:
    """Whether there is batch norm, whose statistics every width has its own of."""
    return bool(norm_records(model))


def widths_to_calibrate(trained: Trained, widths: Sequence[float]) -> list[float]:
    """All of the widths if one has no statistics, else none.

    Training leaves moving averages at the widths it tracks: beside the others' exact statistics
    those would make a spectrum of two kinds.
    """
    return list(widths) if missing_statistics(trained, widths) else []


# ---- spectra -------------------------------------------------------------------------------------


def run_spectrum(
    trained: Trained, widths: Sequence[float] | None = None, measure_latency: bool = True
) -> Spectrum:
    """Evaluates a run at many widths, and writes spectrum.csv, .json, and plots of it.

    Widths are the network's own, as `network_widths` gives them.
    """
    chosen = list(widths or trained.widths)
    found = spectrum(
        trained.model,
        trained.evaluate,
        chosen,
        name=trained.name,
        measure_latency=measure_latency,
    )
    kind = getattr(trained.settings, "method", "us")
    if kind == "i" and chosen == [1.0]:
        # All of a network that was built for one width: tables put it beside that width.
        own = tuple(replace(point, width=trained.settings.width) for point in found.points)
        found = replace(found, points=own)
    elif kind == "i":
        kind = "control"  # an ordinary network sliced to widths it was not made for
        found = replace(found, name=f"{found.name} {trained.settings.width}, sliced")
    found = replace(found, kind=kind)
    folder = trained.run.folder
    write_json(folder / _SPECTRUM, found.to_json())
    found.to_csv(folder / "spectrum.csv")
    trained.run.plots_folder.mkdir(exist_ok=True)
    plots = {"spectrum": found.metric()}
    plots |= {f"spectrum_{name}": name for name in shown_metrics(found) if "score" in name}
    for stem, metric in plots.items():
        for suffix in ("png", "svg"):
            path = trained.run.plots_folder / f"{stem}.{suffix}"
            plot_spectra([found], path, metric, title=found.name)
    return found


def saved_spectrum(run: Run) -> Spectrum:
    """The spectrum that `anywidth spectrum` left in a run's folder."""
    path = run.folder / _SPECTRUM
    if not path.exists():
        raise AnywidthError(f"{run.folder} has no spectrum yet: anywidth spectrum {run.folder}")
    try:
        return Spectrum.from_json(read_json(path))
    except AnywidthError as error:
        named = "" if str(path) in str(error) else f"{path}: "
        raise AnywidthError(
            f"{named}{error}; make it anew: anywidth spectrum {run.folder}"
        ) from error


def saved_spectra(runs: Sequence[Run]) -> list[Spectrum]:
    """The spectra of several runs, told apart by their names.

    Those of one name and kind are one series in tables and plots: seeds, or the I-Nets of several
    widths. Where such runs differ in anything else, the names of their folders are added.
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
    """Refuses to count one training as two seeds."""
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
    """What a run shares with others of its series."""
    left_out = _CIRCUMSTANCES | ({"width"} if found.kind == "i" else set())
    fields = {name: value for name, value in run.settings_data.items() if name not in left_out}
    return json.dumps(fields, sort_keys=True)


def _folder_names(folders: Sequence[Path]) -> list[str]:
    """Their last parts, or where those are not enough, all of them."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


# ---- the report ----------------------------------------------------------------------------------


def run_report(
    trained: Trained, baselines: Sequence[Run] = (), sections: Sequence[Section] = ()
) -> Path:
    """Writes report.html: one page with everything a run shows, and other runs beside it."""
    run = trained.run
    own, *others = saved_spectra([run, *baselines])
    rows = training_rows(trained)
    if has_curves(rows):
        run.plots_folder.mkdir(exist_ok=True)
        plot_curves(rows, run.plots_folder / "training.png")
    path = run.folder / "report.html"
    write_report(
        path,
        title=f"{trained.name} on {trained.settings.data}",
        run_summary={
            "configuration": to_json(trained.settings),
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
        plan_text=_plan_text(trained),
        extra_sections=sections,
    )
    return path


def training_rows(trained: Trained) -> list[dict[str, float]]:
    """The rows of metrics.csv; those of an I-Net once, and under its one width."""
    path = trained.run.metrics_path
    rows = read_metrics(path) if path.exists() else []
    if trained.settings.method != "i":
        return rows
    own = f"/{float(trained.settings.width)}"
    return [
        {_named(name, own): row[name] for name in row if not name.endswith("_min")} for row in rows
    ]


def _named(column: str, own: str) -> str:
    for ending in ("_max", "/1.0"):
        if column.endswith(ending):
            return column.removesuffix(ending) + own
    return column


def _plan_text(trained: Trained) -> str:
    """The printed plan; where there is one width alone, its multiply-adds stand beside that."""
    plan, only = plan_of(trained.model), only_width(trained)
    if only is None:
        return str(plan)
    head, heading, _ = str(plan).rpartition("\nwidth  multiply-adds\n")
    return f"{head}{heading}{only:<5}  {plan.macs(plan.full):,}"
