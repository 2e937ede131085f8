"""Latency over width: one dot per width, with a bar from its fastest to its median pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from anywidth.app.showing.figure_style import BLUE, FAINT_INK
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import Spectrum, SpectrumPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def timed_points(spectrum: Spectrum) -> list[SpectrumPoint]:
    """The points of uniform widths whose latency was measured, narrowest first."""
    known = [
        point
        for point in spectrum.points
        if point.width is not None and math.isfinite(point.latency_ms or math.nan)
    ]
    return sorted(known, key=lambda point: point.width or 0.0)


def latency_conditions(spectrum: Spectrum) -> str:
    """What a latency depends on: what ran the network, the batch and the device."""
    known = [spectrum.latency_by, "batch size 1", spectrum.latency_on]
    return ", ".join(filter(None, known))


def latency_figure(spectrum: Spectrum) -> Figure:
    """Latency over width; call it and `figure_bytes` inside `style()`."""
    from matplotlib.figure import Figure

    points = timed_points(spectrum)
    if not points:
        raise AnywidthError(f"the spectrum {spectrum.name!r} has no latencies to draw")
    widths = [point.width or 0.0 for point in points]
    times = [point.latency_ms or 0.0 for point in points]
    ranges = [
        point.latency_range or (time, time) for point, time in zip(points, times, strict=True)
    ]
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(widths, times, marker="o", markersize=4.5, color=BLUE)
    axes.vlines(widths, *zip(*ranges, strict=True), color=BLUE, linewidth=1.2, alpha=0.6)
    # From zero, so that twice as high is twice as long.
    axes.set_ylim(0, 1.08 * max(*times, *(high for _, high in ranges)))
    axes.set_xlabel("width")
    axes.set_ylabel("latency, ms")
    figure.suptitle(spectrum.name, x=0.02, ha="left", weight="bold", size=12)
    axes.set_title(
        f"{latency_conditions(spectrum)}; bars from the fastest to the median pass",
        size=9,
        weight="normal",
        color=FAINT_INK,
    )
    return figure
