"""The figures of a study: mean over the seeds, with a band from the best to the worst of them."""

from __future__ import annotations

from pathlib import Path

from anywidth.files import write_atomically
from anywidth.plots import figure_bytes, spectra_figure, style
from anywidth.studies.comparing import METRIC, Results
from anywidth.studies.parts import Picture
from anywidth.studies.tables import mean_spectrum


def draw(picture: Picture, results: Results, out: Path) -> list[Path]:
    """Writes a figure as PNG and SVG."""
    lines = [(picture.network.name, label) for label in picture.labels]
    by_seed = [results.seeds(line) for line in lines]
    written = []
    with style():
        figure = spectra_figure([mean_spectrum(one) for one in by_seed], METRIC, picture.title)
        axes = figure.axes[0]
        # A line was drawn for each setting, in their order, its points sorted by their cost.
        for drawn, one in zip(axes.lines, by_seed, strict=True):
            seeds = [
                sorted((point.macs, point.metrics[METRIC]) for point in spectrum.points)
                for spectrum in one.values()
            ]
            values = list(zip(*([error for _, error in points] for points in seeds), strict=True))
            low, high = [min(v) for v in values], [max(v) for v in values]
            places = drawn.get_xdata()
            if len(one) > 1 and len(values) > len(picture.network.widths):
                axes.fill_between(places, low, high, color=drawn.get_color(), alpha=0.15, lw=0)
            elif len(one) > 1:
                axes.vlines(places, low, high, color=drawn.get_color(), lw=1.2)
        for form in ("png", "svg"):
            path = out / f"{picture.file}.{form}"
            write_atomically(path, figure_bytes(figure, form))
            written.append(path)
    return written
