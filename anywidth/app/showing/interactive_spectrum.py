"""The spectrum that a reader can point at: what `report_page_spectrum.js` draws."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from anywidth.app.showing.plots import series_colors
from anywidth.app.showing.spectrum_tables import format_count, format_point, format_width
from anywidth.measuring.spectra import Spectrum, SpectrumPoint, joined

# A control that spreads wider than the others so many times is switched off until asked for.
_SQUEEZES = 3.0


def interactive_spectrum(spectra: Sequence[Spectrum], metric: str, drawn: str) -> str:
    """Markup that the page's script turns into a drawing to point at.

    Args:
        spectra: the network's first, then what it is compared with.
        metric: what is drawn over multiply-adds.
        drawn: the figure that is shown without scripts.
    """
    data = {
        "series": _series(spectra, metric),
        "xLabel": "multiply-adds",
        "yLabel": spectra[0].describe(metric).label,
    }
    # What names say must not end the element early.
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
    return {
        "x": point.macs,
        "y": _value(point, metric),
        "told": f"{told}{format_count(point.macs)} multiply-adds{latency}",
    }


def _value(point: SpectrumPoint, metric: str) -> float:
    return point.metrics.get(metric, math.nan)


def _spread(points: Sequence[SpectrumPoint], metric: str) -> float:
    values = [_value(point, metric) for point in points]
    return max(values) - min(values) if values else 0.0
