"""The figures of a study.

Spectra are means over the seeds, with a band from the best to the worst of them. Learning curves
are the paper's figure 5: of I-Nets and of the US-Net, and both at the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anywidth.app.runs.metrics import read_metrics
from anywidth.app.showing.figure_style import BLUE, GREEN, INK, ORANGE, PURPLE, write_figures
from anywidth.app.showing.plots import LOOKS, series_colors, spectra_figure
from anywidth.app.showing.spectrum_tables import format_count
from anywidth.app.studies.comparing import Results
from anywidth.app.studies.study_parts import Picture, Study
from anywidth.app.studies.trainings import Job
from anywidth.measuring.spectra import STANDARD_ERROR, Spectrum, standard_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Space between the outermost band and the frame, as a share of the axis.
_MARGIN = 0.03
_COLORS = (ORANGE, PURPLE, GREEN, BLUE)


def study_figure(picture: Picture, results: Results) -> Figure:
    """Some settings of a network; call it inside `style()`."""
    by_seed = [[*results.seeds((picture.network.name, one)).values()] for one in picture.labels]
    means = [_mean_spectrum(spectra) for spectra in by_seed]
    named = [replace(mean, name=picture.legend.get(mean.name, mean.name)) for mean in means]
    figure = spectra_figure(named, results.metric, picture.title)
    axes = figure.axes[0]
    # There is one named line per setting, in order, with its points sorted by cost.
    named_lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    for drawn, spectra in zip(named_lines, by_seed, strict=True):
        points = [
            sorted((p.macs, p.metrics[results.metric]) for p in one.points) for one in spectra
        ]
        values = np.array(points)[:, :, 1]
        low, high = values.min(axis=0), values.max(axis=0)
        places = drawn.get_xdata()
        if len(spectra) > 1 and len(low) > len(picture.network.widths):
            axes.fill_between(places, low, high, color=drawn.get_color(), alpha=0.15, lw=0)
        elif len(spectra) > 1:
            axes.vlines(places, low, high, color=drawn.get_color(), lw=1.2)
        # Extend the axis so that the bands of all visible means fit.
        bottom, top = axes.get_ylim()
        shown = (bottom <= values.mean(axis=0)) & (values.mean(axis=0) <= top)
        lowest, highest = low[shown].min(initial=top), high[shown].max(initial=bottom)
        margin = _MARGIN * (max(top, highest) - min(bottom, lowest))
        axes.set_ylim(min(bottom, lowest - margin), max(top, highest + margin))
    return figure


def _mean_spectrum(spectra: Sequence[Spectrum]) -> Spectrum:
    """The mean over the seeds, point by point; the seeds' spread replaces standard errors."""
    if len(spectra) == 1:
        return spectra[0]
    points = [
        replace(
            same[0],
            metrics={
                name: statistics.mean(point.metrics[name] for point in same)
                for name in same[0].metrics
                if not name.endswith(STANDARD_ERROR)
            },
        )
        for same in zip(*(one.points for one in spectra), strict=True)
    ]
    return replace(spectra[0], points=tuple(points))


def draw_curves(study: Study, jobs: Sequence[Job], results: Results, out: Path) -> str | None:
    """Write NAME-curves.png and .svg and return NAME-curves; None if no training has a log."""
    logged = [job for job in jobs if (job.folder / "metrics.csv").exists()]
    if study.curves is None or not logged:
        return None
    file = f"{study.name}-curves"
    write_figures(out / file, lambda: _figure(study, logged, results))
    return file


def _figure(study: Study, logged: Sequence[Job], results: Results) -> Figure:
    from matplotlib.figure import Figure

    (network,) = study.networks
    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    for axes, title, is_alone in ((left, "I-Nets", True), (middle, "US-Net", False)):
        some = [job for job in logged if (job.settings.method == "i") == is_alone]
        _draw_learning(axes, some, study.curves or "", network.widths)
        axes.set_title(title)
    left.set_ylabel("mean score of full games")
    _draw_ends(right, results, network.widths)
    right.set_title("At the end")
    figure.suptitle(logged[0].settings.trained_on, x=0.01, ha="left", fontweight="bold")
    return figure


def _draw_learning(axes: Axes, jobs: Sequence[Job], metric: str, widths: Sequence[float]) -> None:
    """The mean over the seeds, with each seed in a faint line; not smoothed."""
    logs = [read_metrics(job.folder / "metrics.csv") for job in jobs]
    for width, color in zip(widths, _COLORS, strict=False):
        score = f"{metric}/{width}"
        found = ({row["agent_steps"]: row[score] for row in rows if score in row} for rows in logs)
        curves = [curve for curve in found if curve]
        if not curves:
            continue
        for curve in curves if len(curves) > 1 else ():
            axes.plot(list(curve), list(curve.values()), color=color, alpha=0.25, linewidth=1)
        shared = sorted(set.intersection(*map(set, curves)))
        means = [statistics.mean(curve[step] for curve in curves) for step in shared]
        axes.plot(shared, means, color=color, label=f"{width}")
    axes.set_xlabel("agent steps")
    axes.xaxis.set_major_formatter(lambda value, position: format_count(value))
    if axes.lines:
        axes.legend(title="width", labelcolor=INK)


def _draw_ends(axes: Axes, results: Results, widths: Sequence[float]) -> None:
    spectra = [list(by_seed.values()) for by_seed in results.spectra.values()]
    colors = series_colors([one.kind for one, *_ in spectra])
    for seeds, color in zip(spectra, colors, strict=True):
        ends = [_end(seeds, width, results.metric) for width in widths]
        means, errors = zip(*ends, strict=True)
        look = LOOKS[seeds[0].kind][0] | {"linestyle": "-"}
        axes.errorbar(widths, means, errors, capsize=3, color=color, label=seeds[0].name, **look)
    axes.set_xlabel("width")
    axes.set_xticks(list(widths))
    axes.legend(labelcolor=INK)


def _end(seeds: Sequence[Spectrum], width: float, metric: str) -> tuple[float, float]:
    """Mean, and its standard error: over seeds if there are several, else over games."""
    points = [one.at(width) for one in seeds]
    scores = [point.metrics[metric] for point in points]
    if len(scores) == 1:
        return scores[0], standard_error(points[0], metric)
    return statistics.mean(scores), statistics.stdev(scores) / len(scores) ** 0.5
