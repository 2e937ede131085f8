"""Drawings that a reader can point at: the data that `report_page_spectrum.js` draws."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from anywidth.app.showing.figure_style import BLUE
from anywidth.app.showing.plots import least_span, series_colors, timed_points
from anywidth.app.showing.spectrum_tables import format_count, format_point, format_width
from anywidth.measuring.spectra import Spectrum, SpectrumPoint, joined, standard_error

# A control whose values spread this many times as far as the others' starts switched off.
_SQUEEZES = 3.0


def interactive_spectrum(spectra: Sequence[Spectrum], metric: str, drawn: str) -> str:
    """A metric over multiply-adds, as markup that the page's script turns into a drawing.

    The first spectrum is that of the run. Without scripts, the page shows the figure `drawn`.
    """
    series = _series(spectra, metric)
    points = [point for one in series if not one["isHidden"] for point in one["points"]]
    errors = [(point["high"] - point["low"]) / 2 if "low" in point else 0.0 for point in points]
    data = {
        "series": series,
        "xLabel": "multiply-adds",
        "yLabel": spectra[0].describe(metric).label,
        "leastSpan": least_span([point["y"] for point in points], errors) if points else 0.0,
    }
    return _markup(data, drawn)


def interactive_latency(spectrum: Spectrum, drawn: str) -> str:
    """The same kind of markup for latency over width."""
    points = []
    for point in timed_points(spectrum):
        told = f"width {format_width(point.width)}: {point.latency_ms:.3g} ms"
        shown: dict[str, Any] = {"x": point.width, "y": point.latency_ms}
        if point.latency_range:
            shown["low"], shown["high"] = point.latency_range
            told += f", fastest {shown['low']:.3g}, median {shown['high']:.3g}"
        points.append({**shown, "told": told})
    series = {"name": spectrum.name, "color": BLUE, "isLine": True, "points": points}
    data = {"series": [series], "xLabel": "width", "yLabel": "latency, ms", "floor": 0}
    return _markup(data, drawn)


def _markup(data: dict[str, Any], drawn: str) -> str:
    # A name that contains "</script>" must not end the element.
    text = json.dumps(data).replace("<", "\\u003c")
    return f'<script type="application/json" class="spectrum-data">{text}</script>\n{drawn}'


def _series(spectra: Sequence[Spectrum], metric: str) -> list[dict[str, Any]]:
    known = [
        (one, [point for point in one.points if math.isfinite(_value(point, metric))])
        for one in joined(spectra)
    ]
    colors = series_colors([one.kind for one, _ in known])
    spreads = [_spread(points, metric) for _, points in known]
    pairs = zip(known, spreads, strict=True)
    most = _SQUEEZES * max((s for (one, _), s in pairs if one.kind != "control"), default=math.inf)
    return [
        {
            "name": one.name or one.kind,
            "color": color,
            "isLine": one.kind in ("us", "control"),
            "isHidden": one.kind == "control" and spread > most,
            "points": [_point(one, point, metric) for point in points],
        }
        for (one, points), color, spread in zip(known, colors, spreads, strict=True)
    ]


def _point(spectrum: Spectrum, point: SpectrumPoint, metric: str) -> dict[str, Any]:
    described = spectrum.describe(metric)
    where = "nonuniform" if point.width is None else f"width {format_width(point.width)}"
    value = f"{described.label} {format_point(point, metric, described)}"
    told = f"{spectrum.name or spectrum.kind}, {where}: {value}, "
    latency = f", {point.latency_ms:.3g} ms" if point.latency_ms is not None else ""
    found: dict[str, Any] = {
        "x": point.macs,
        "y": _value(point, metric),
        "told": f"{told}{format_count(point.macs)} multiply-adds{latency}",
    }
    error = standard_error(point, metric)
    if error and math.isfinite(error):
        found |= {"low": found["y"] - error, "high": found["y"] + error}
    return found


def _value(point: SpectrumPoint, metric: str) -> float:
    return point.metrics.get(metric, math.nan)


def _spread(points: Sequence[SpectrumPoint], metric: str) -> float:
    values = [_value(point, metric) for point in points]
    return max(values) - min(values) if values else 0.0
