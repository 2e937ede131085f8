"""`anywidth calibrate`, `spectrum`, `compare` and `report`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from anywidth.app.runs.run import Run
from anywidth.app.showing.output import console, say
from anywidth.app.showing.plots import plot_spectra
from anywidth.app.showing.spectrum_tables import comparison_table, spectrum_table
from anywidth.app.tasks.command_options import DataDir, Device, EvalDir, RunFolder
from anywidth.app.tasks.registry import check_same_task, open_trained, task_of
from anywidth.app.tasks.results import run_report, run_spectrum, saved_spectra, saved_spectrum
from anywidth.app.tasks.trained import Trained
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import Spectrum
from anywidth.measuring.width_lists import parse_widths
from anywidth.slimming.convert import plan_of

EVERY = "every"
Widths = Annotated[
    str | None,
    typer.Option(
        help="first:last:step, a list such as 0.25,0.5,1.0, or `every`: one for each choice of "
        "channels there is. If not given, the run's own, such as every 0.025 of its range."
    ),
]


def calibrate(
    run: RunFolder,
    widths: Widths = None,
    samples: Annotated[
        int | None, typer.Option(help="Training images; if not given, the run's own number.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="exact or moving averages; if not given, the run's own.")
    ] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
) -> None:
    """Compute batch-norm statistics of a trained network for any widths, and keep them.

    Example:

      anywidth calibrate runs/demo --widths 0.25:1.0:0.025 --samples 1000
    """
    _check_writable(run)
    if not open_trained(run, device, with_data=False).has_statistics:
        say("This network has no batch norm: every width can be run as it is.")
        return
    trained = open_trained(run, device, data_dir=data_dir)
    chosen = _chosen(trained, widths)
    images = trained.calibrate(chosen, samples, method)
    say(f"{_counted(chosen)} calibrated over {images:,} images: {', '.join(map(str, chosen))}")
    if _earlier(trained.run) is not None:
        say(f"Spectrum and report are of before; make them anew: anywidth spectrum {run}")


def spectrum(
    run: RunFolder,
    widths: Widths = None,
    latency: Annotated[
        bool,
        typer.Option(help="Time each width, on a CPU extracted and with its norms merged."),
    ] = True,
    device: Device = "auto",
    data_dir: DataDir = None,
    eval_dir: EvalDir = None,
) -> None:
    """Evaluate a trained network at many widths: a table, spectrum.csv and plots.

    If one of the widths has no batch-norm statistics, all are calibrated first.
    The files hold the widths of this call alone: those of an earlier one are
    written over.

    Example:

      anywidth spectrum runs/demo --widths 0.25:1.0:0.025
    """
    _check_writable(run)
    trained = open_trained(run, device, data_dir=data_dir, eval_dir=eval_dir)
    chosen = _chosen(trained, widths)
    trained.complete_statistics(chosen)
    before = _earlier(trained.run)
    found = run_spectrum(trained, chosen, latency)
    console.print(spectrum_table(found))
    say(f"Written: {run / 'spectrum.csv'} and plots in {run / 'plots'}")
    if before is not None and not _widths(before) <= _widths(found):
        say(f"They take the place of an earlier spectrum of {_counted(before.points)}.")


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs with a spectrum.")],
    out: Annotated[Path, typer.Option(help="The plot: .png or .svg.")] = Path("comparison.png"),
    metric: Annotated[
        str | None,
        typer.Option(
            help="Which metric to draw: top1_error, top5_error or loss; psnr or ssim; score or "
            "greedy_score. If not given, the first of its task."
        ),
    ] = None,
) -> None:
    """Put the spectra of several runs (US-, S- and I-Nets) into one table and one plot.

    Runs that differ in their seed alone are one series, of which the mean is
    shown; so are I-Nets of several widths.

    Example:

      anywidth compare runs/us runs/s runs/i-0.25 runs/i-1.0 --out comparison.png
    """
    if len(runs) < 2:
        raise AnywidthError("compare needs at least two runs")
    if not out.parent.is_dir():
        raise AnywidthError(f"--out {out}: there is no folder {out.parent}")
    if out.suffix.lower() not in (".png", ".svg"):
        raise AnywidthError(f"--out {out}: expected a name that ends in .png or .svg")
    opened = [Run.open(folder) for folder in runs]
    check_same_task(opened)
    spectra = saved_spectra(opened)
    console.print(comparison_table(spectra, metric))
    plot_spectra(spectra, out, metric)
    say(f"Written: {out}")


def report(
    run: RunFolder,
    baseline: Annotated[
        list[Path] | None, typer.Option(help="A run to draw beside it; may be repeated.")
    ] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    eval_dir: EvalDir = None,
) -> None:
    """Write report.html: spectrum, training curves, a table of widths, the plan, on one page.

    A super-resolution run adds crops at several widths beside bicubic and the truth.

    Example:

      anywidth report runs/us --baseline runs/i-0.25 --baseline runs/i-1.0
    """
    own, *baselines = [Run.open(folder) for folder in (run, *(baseline or []))]
    _check_writable(run)
    check_same_task([own, *baselines])
    with_data = task_of(own).trained.sections_need_data
    trained = open_trained(run, device, with_data, data_dir=data_dir, eval_dir=eval_dir)
    say(f"Report: {run_report(trained, baselines)}")


def _check_writable(folder: Path) -> None:
    """Before the work, not after it."""
    Run.open(folder)  # says so if it is none
    if not os.access(folder, os.W_OK | os.X_OK):
        raise AnywidthError(
            f"{folder} cannot be written to, where the results belong: copy the run to a folder "
            "that can, and name that one"
        )


def _chosen(trained: Trained, widths: str | None) -> list[float]:
    """The widths that an option asks for."""
    if widths == EVERY and trained.settings.can_narrow(trained.model):
        return plan_of(trained.model).distinct_widths()
    if widths is None or widths == EVERY:
        return trained.widths
    chosen = parse_widths(widths, f", or `{EVERY}`")
    for width in chosen:
        trained.own_width(width)  # refuses one that the network does not have
    return chosen


def _counted(widths: Sequence[object]) -> str:
    return "1 width" if len(widths) == 1 else f"{len(widths)} widths"


def _earlier(run: Run) -> Spectrum | None:
    """The spectrum there is already; a damaged one is none."""
    with contextlib.suppress(AnywidthError):
        return saved_spectrum(run)
    return None


def _widths(found: Spectrum) -> set[float | None]:
    return {point.width for point in found.points}
