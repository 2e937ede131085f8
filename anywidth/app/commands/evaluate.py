"""`anywidth calibrate`, `tune`, `spectrum`, `compare` and `report`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from anywidth.app.own_command import own_command
from anywidth.app.showing.output import console, say
from anywidth.app.tasks import command_options as options
from anywidth.errors import AnywidthError
from anywidth.measuring.heartbeat import working
from anywidth.measuring.width_lists import parse_widths

if TYPE_CHECKING:
    from anywidth.app.runs.folder_lock import FolderLock
    from anywidth.app.tasks.trained import Trained
    from anywidth.width import Width

EVERY = "every"
Widths = Annotated[
    str | None,
    typer.Option(
        help="Widths: first:last:step, a list such as 0.25,0.5,1.0, or `every` for all widths that "
        "differ in their channels. If not given, the run's own widths, such as 0.25, 0.275, ..., 1."
    ),
]


def calibrate(
    run: options.RunFolder,
    widths: Widths = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Number of training images to use; if not given, as in the run's settings."
        ),
    ] = None,
    method: Annotated[
        Literal["exact", "moving"] | None,
        typer.Option(help="How to average; if not given, as in the run's settings."),
    ] = None,
    device: options.Device = "auto",
    model: options.Model = None,
    trust: options.Trust = False,
    data_dir: options.DataDir = None,
) -> None:
    """Compute and save batch-norm statistics of a trained network for more widths.

    Batch norm needs its own statistics at each width. Other commands compute
    missing ones themselves; calibrate them here if the training data will not
    be at hand later. The weights do not change.

    Example:

      anywidth calibrate runs/demo --widths 0.25:1.0:0.025 --samples 1000
    """
    from anywidth.app.tasks.registry import open_trained

    _lock = _hold(run)
    trained = open_trained(run, device, with_data=False, trust=trust, model=model)
    if not trained.has_statistics:
        say("This network has no batch norm: every width can be used without calibration.")
        return
    with working(f"opening {run} and its data"):
        trained = trained.with_data(data_dir=data_dir)
    chosen = _chosen_widths(trained, widths)
    images = trained.calibrate(chosen, samples, method)
    _say_changed(trained, chosen, f"calibrated over {images:,} images")


def tune(
    run: options.RunFolder,
    widths: Annotated[
        str, typer.Option(help="Calibrated widths, as a list such as 0.25,0.5 or first:last:step.")
    ],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate of Adam.")] = 1e-3,
    device: options.Device = "auto",
    model: options.Model = None,
    trust: options.Trust = False,
    data_dir: options.DataDir = None,
) -> None:
    """Tune batch norm's scales and biases for a few widths of a trained network, and save them.

    All weights and all other widths stay as they are. The widths must have
    statistics, which are computed again; `anywidth calibrate` makes them.

    Example:

      anywidth tune runs/demo --widths 0.25,0.5
    """
    from anywidth.app.tasks.registry import open_trained

    _lock = _hold(run)
    trained = open_trained(run, device, with_data=False, trust=trust, model=model)
    if not trained.has_statistics:
        raise AnywidthError(f"{run} has a network without batch norm: there is nothing to tune")
    trained = trained.with_data(data_dir=data_dir)
    chosen = _chosen_widths(trained, widths)
    _check_tunable(trained, chosen, learning_rate)
    images = trained.tune(chosen, epochs, learning_rate)
    _say_changed(trained, chosen, f"tuned over {images:,} images")


def spectrum(
    run: options.RunFolder,
    widths: Widths = None,
    channels: options.ManyChannels = None,
    latency: Annotated[
        bool,
        typer.Option(help="Also measure the time of one example at each width."),
    ] = True,
    device: options.Device = "auto",
    model: options.Model = None,
    trust: options.Trust = False,
    data_dir: options.DataDir = None,
    eval_dir: options.EvalDir = None,
) -> None:
    """Evaluate a trained network at many widths: a table, spectrum.csv and plots.

    The spectrum shows what each width costs and how good it is, so that you can
    choose one. Widths without batch-norm statistics are calibrated first.
    Latency is measured with onnxruntime if anywidth-runtime is installed, else
    with PyTorch. Files of an earlier spectrum are overwritten.

    Example:

      anywidth spectrum runs/demo --widths 0.25:1.0:0.025
    """
    from anywidth.app.showing.spectrum_tables import spectrum_table
    from anywidth.app.tasks.chosen_width import given_channels
    from anywidth.app.tasks.registry import open_trained
    from anywidth.app.tasks.results import earlier_spectrum, run_spectrum

    _lock = _hold(run)
    with working(f"opening {run} and its data"):
        trained = open_trained(
            run, device, trust=trust, model=model, data_dir=data_dir, eval_dir=eval_dir
        )
    own = (given_channels(trained, path) for path in channels or ())
    chosen: list[Width] = [*_chosen_widths(trained, widths), *own]
    trained.complete_statistics(chosen)
    before = earlier_spectrum(trained.run)
    found = run_spectrum(trained, chosen, latency)
    console.print(spectrum_table(found))
    say(f"Written: {run / 'spectrum.csv'} and plots in {run / 'plots'}")
    if before is not None and {p.width for p in before.points} - {p.width for p in found.points}:
        say(f"They replace an earlier spectrum of {_counted(before.points)}.")


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs that have a spectrum.")
    ],
    out: Annotated[Path, typer.Option(help="The plot: .png or .svg.")] = Path("comparison.png"),
    metric: Annotated[
        str | None,
        typer.Option(
            help="The metric to draw: top1_error, top5_error or loss; psnr or ssim; score or "
            "greedy_score. If not given, the first of the task."
        ),
    ] = None,
) -> None:
    """Compare the spectra of several runs in one table and one plot.

    Use it to compare a network for all widths (US-Net) with networks trained for
    one width each (I-Nets) or for a few (S-Net). Runs that differ only in their
    seed are one series with their mean. I-Nets of several widths are one series.

    Example:

      anywidth compare runs/us runs/s runs/i-0.25 runs/i-1.0 --out comparison.png
    """
    from anywidth.app.runs.run import Run
    from anywidth.app.showing.plots import plot_spectra
    from anywidth.app.showing.spectrum_tables import comparison_table
    from anywidth.app.tasks.registry import check_same_task
    from anywidth.app.tasks.results import saved_spectra

    if len(runs) < 2:
        raise AnywidthError("compare: give at least two runs")
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
    run: options.RunFolder,
    baseline: Annotated[
        list[Path] | None,
        typer.Option(help="A run to compare with; repeat the option for several runs."),
    ] = None,
    device: options.Device = "auto",
    model: options.Model = None,
    trust: options.Trust = False,
    data_dir: options.DataDir = None,
    eval_dir: options.EvalDir = None,
) -> None:
    """Write report.html: one page with all results of a run.

    It shows the spectrum, the latency, the training curves, a table of all
    widths, the settings and the plan. Super-resolution adds crops of pictures.
    Training writes it too; use this command to add runs to compare with.

    Example:

      anywidth report runs/us --baseline runs/i-0.25 --baseline runs/i-1.0
    """
    from anywidth.app.runs.run import Run
    from anywidth.app.tasks.registry import check_same_task, open_trained, task_of
    from anywidth.app.tasks.results import run_report

    own, *baselines = [Run.open(folder) for folder in (run, *(baseline or []))]
    _lock = _hold(run)
    check_same_task([own, *baselines])
    with_data = task_of(own).trained.sections_need_data
    with working(f"opening {run}"):
        trained = open_trained(
            run, device, with_data, trust=trust, model=model, data_dir=data_dir, eval_dir=eval_dir
        )
    with working("drawing the report"):
        page = run_report(trained, baselines)
    say(f"Report: {page}")


def _hold(folder: Path) -> FolderLock | None:
    """A finished run that no other process writes to as long as the result exists."""
    from anywidth.app.runs.folder_lock import lock_folder
    from anywidth.app.runs.run import Run, check_writable

    run = Run.open_finished(folder)
    check_writable(folder)
    try:
        lock = lock_folder(folder)
    except AnywidthError:
        say(f"Waiting for another process that writes to {folder}")
        lock = lock_folder(folder, wait=True)
    run.remove_leftovers()
    return lock


def _check_tunable(trained: Trained, widths: Sequence[float], learning_rate: float) -> None:
    from anywidth.slimming.convert import plan_of

    if not 0 < learning_rate < math.inf:
        raise AnywidthError(f"--learning-rate {learning_rate}: expected a number above 0")
    plan = plan_of(trained.model)
    full = [width for width in widths if plan.resolve(trained.own_width(width)) == plan.full]
    if full:
        raise AnywidthError(
            f"--widths {full[0]}: the scales and biases of the full width are the network's own, "
            "which other widths use too; leave it out"
        )
    if missing := trained.uncalibrated(widths):
        named, folder = ",".join(map(str, missing)), trained.run.folder
        again = own_command("calibrate", folder, "--widths", named, *trained.settings.allowance)
        raise AnywidthError(f"no statistics for width {named} yet; compute them with: {again}")


def _chosen_widths(trained: Trained, widths: str | None) -> list[float]:
    """The widths of an option."""
    from anywidth.slimming.convert import plan_of

    if widths == EVERY and trained.settings.can_narrow(trained.model):
        return plan_of(trained.model).distinct_widths()
    if widths is None or widths == EVERY:
        return trained.widths
    chosen = parse_widths(widths, f", or `{EVERY}`")
    for width in chosen:
        trained.own_width(width)  # raises if the network does not have it
    return chosen


def _counted(widths: Sequence[object]) -> str:
    return "1 width" if len(widths) == 1 else f"{len(widths)} widths"


def _say_changed(trained: Trained, widths: Sequence[float], done: str) -> None:
    """Say what was done at which widths, and if a spectrum was measured before that."""
    from anywidth.app.tasks.results import earlier_spectrum

    say(f"{_counted(widths)} {done}: {', '.join(map(str, widths))}")
    if earlier_spectrum(trained.run) is None:
        return
    say("The spectrum and report are older; update them with:")
    for name in ("spectrum", "report"):
        say(f"  {own_command(name, trained.run.folder, *trained.settings.allowance)}")
