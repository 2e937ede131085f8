"""The figures of a study: mean over the seeds, with a band from the best to the worst of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from anywidth.app.showing.plots import spectra_figure
from anywidth.app.studies.comparing import Results
from anywidth.app.studies.study_parts import Picture
from anywidth.app.studies.tables import mean_spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Space between the outermost band and the frame, as a share of the axis.
_MARGIN = 0.03


def study_figure(picture: Picture, results: Results) -> Figure:
    """Some settings of a network; call it inside `style()`."""
    by_seed = [results.seeds((picture.network.name, label)) for label in picture.labels]
    means = [mean_spectrum(one) for one in by_seed]
    named = [replace(mean, name=picture.legend.get(mean.name, mean.name)) for mean in means]
    figure = spectra_figure(named, results.metric, picture.title)
    axes = figure.axes[0]
    # There is one named line per setting, in order, with its points sorted by cost.
    named_lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    for drawn, one in zip(named_lines, by_seed, strict=True):
        seeds = [
            sorted((point.macs, point.metrics[results.metric]) for point in spectrum.points)
            for spectrum in one.values()
        ]
        values = list(zip(*([error for _, error in points] for points in seeds), strict=True))
        low, high = [min(v) for v in values], [max(v) for v in values]
        places = drawn.get_xdata()
        if len(one) > 1 and len(values) > len(picture.network.widths):
            axes.fill_between(places, low, high, color=drawn.get_color(), alpha=0.15, lw=0)
        elif len(one) > 1:
            axes.vlines(places, low, high, color=drawn.get_color(), lw=1.2)
        _make_room(axes, [sum(v) / len(v) for v in values], low, high)
    return figure


def _make_room(
    axes: Axes, means: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> None:
    """Extend the axis so that the bands of all visible means fit."""
    bottom, top = axes.get_ylim()
    shown = [bottom <= mean <= top for mean in means]
    lowest = min(itertools.compress(low, shown), default=top)
    highest = max(itertools.compress(high, shown), default=bottom)
    margin = _MARGIN * (max(top, highest) - min(bottom, lowest))
    axes.set_ylim(min(bottom, lowest - margin), max(top, highest + margin))
