"""What a finished run shows: its spectrum in a table, in files and in plots, and its report."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from anywidth._version import __version__
from anywidth.config import to_json
from anywidth.convert import plan_of
from anywidth.errors import AnywidthError
from anywidth.files import read_json, write_json
from anywidth.layers import is_switched_norm
from anywidth.metrics import read_metrics
from anywidth.plots import has_curves, plot_curves, plot_spectra
from anywidth.report import Section, write_report
from anywidth.run import Run
from anywidth.spectra import Spectrum, shown_metrics, spectrum
from anywidth.statistics import calibrated_widths, is_full_width_new
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
    def config(self) -> Any: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def name(self) -> str: ...

    @property
    def widths(self) -> list[float]: ...

    def calibrate(
        self, widths: Sequence[Width], samples: int | None = None, method: str | None = None
    ) -> None: ...

    def evaluate(self, model: nn.Module) -> dict[str, float]: ...


def missing_statistics(trained: Trained, widths: Sequence[float]) -> list[float]:
    """Those of the widths that have to be calibrated before they can be evaluated."""
    if not has_statistics(trained.model):
        return []
    plan = plan_of(trained.model)
    known = {plan.resolve(width) for width in calibrated_widths(trained.model)}
    if is_full_width_new(trained.model):
        known.discard(plan.full)
    return [width for width in widths if plan.resolve(width) not in known]


def has_statistics(model: nn.Module) -> bool:
    """Whether there is batch norm, whose statistics every width has its own of."""
    return any(is_switched_norm(module) for module in model.modules())


def widths_to_calibrate(trained: Trained, widths: Sequence[float]) -> list[float]:
    """All of the widths if one has no statistics, else none.

    Training leaves moving averages at the widths it tracks: beside the others' exact statistics
    those would make a spectrum of two kinds.
    """
    return list(widths) if missing_statistics(trained, widths) else []


def run_spectrum(
    trained: Trained, widths: Sequence[float] | None = None, measure_latency: bool = True
) -> Spectrum:
    """Evaluates a run at many widths, and writes spectrum.csv, .json, and plots of it."""
    chosen = list(widths or trained.widths)
    found = spectrum(
        trained.model,
        trained.evaluate,
        chosen,
        name=trained.name,
        measure_latency=measure_latency,
    )
    kind = getattr(trained.config, "method", "us")
    if kind == "i" and chosen == [1.0]:
        # All of a network that was built for one width: tables put it beside that width.
        own = tuple(replace(point, width=trained.config.width) for point in found.points)
        found = replace(found, points=own)
    elif kind == "i":
        kind = "control"  # an ordinary network sliced to widths it was not made for
        found = replace(found, name=f"{found.name} {trained.config.width}, sliced")
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
    return Spectrum.from_json(read_json(path))


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
        if len(recipes) > 1:
            labels = _folder_names([runs[positions[0]].folder for positions in recipes.values()])
            for label, positions in zip(labels, recipes.values(), strict=True):
                others = f" and {len(positions) - 1} more" if len(positions) > 1 else ""
                for position in positions:
                    name = f"{spectra[position].name} ({label}{others})"
                    spectra[position] = replace(spectra[position], name=name)
    return spectra


def _recipe(run: Run, found: Spectrum) -> str:
    """What a run shares with others of its series."""
    left_out = _CIRCUMSTANCES | ({"width"} if found.kind == "i" else set())
    fields = {name: value for name, value in run.config_data.items() if name not in left_out}
    return json.dumps(fields, sort_keys=True)


def _folder_names(folders: Sequence[Path]) -> list[str]:
    """Their last parts, or where those are not enough, all of them."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def run_report(
    trained: Trained, baselines: Sequence[Run] = (), sections: Sequence[Section] = ()
) -> Path:
    """Writes report.html: one page with everything a run shows, and other runs beside it."""
    run = trained.run
    own, *others = saved_spectra([run, *baselines])
    rows = read_metrics(run.metrics_path) if run.metrics_path.exists() else []
    if has_curves(rows):
        run.plots_folder.mkdir(exist_ok=True)
        plot_curves(rows, run.plots_folder / "training.png")
    path = run.folder / "report.html"
    write_report(
        path,
        title=f"{trained.name} on {trained.config.data}",
        run_summary={
            "configuration": to_json(trained.config),
            "versions": {
                "anywidth": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "device": _device_name(trained.model),
            },
        },
        spectrum=own,
        baselines=others,
        metrics=rows,
        plan_text=str(plan_of(trained.model)),
        extra_sections=sections,
    )
    return path


def _device_name(model: nn.Module) -> str:
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
