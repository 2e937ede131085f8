"""One self-contained HTML page about a run: plots, table, plan, settings."""

from __future__ import annotations

import base64
import itertools
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anywidth._version import __version__
from anywidth.app.showing.curves import curves_panels
from anywidth.app.showing.figure_style import FAINT_INK, GRID, INK, figure_bytes, style
from anywidth.app.showing.interactive_spectrum import interactive_latency, interactive_spectrum
from anywidth.app.showing.plots import (
    latency_conditions,
    latency_figure,
    spectra_figure,
    timed_points,
)
from anywidth.app.showing.spectrum_tables import (
    format_count,
    format_mean,
    format_metric,
    format_point,
    format_width,
    shown_metrics,
)
from anywidth.errors import AnywidthError
from anywidth.files import write_atomically
from anywidth.measuring.spectra import Spectrum, SpectrumPoint, joined, standard_error, values_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The page is self-contained and loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Section:
    """A part of the page that a task adds; neighbours with one title share a heading.

    Args:
        html: markup, not escaped: escape everything that is not from the code.
        images: label below each → bytes of a PNG file.
    """

    title: str
    html: str = ""
    images: Mapping[str, bytes] = field(default_factory=dict)
    caption: str = ""


def write_report(
    path: str | Path,
    *,
    title: str,
    run_summary: Mapping[str, Any],
    spectrum: Spectrum,
    baselines: Sequence[Spectrum] = (),
    metrics: Sequence[Mapping[str, float]] = (),
    curves: Mapping[str, str] | None = None,
    plan_text: str = "",
    extra_sections: Sequence[Section] = (),
) -> None:
    """Write the page; it needs no other file and no internet.

    Args:
        run_summary: facts about the run by name; a mapping inside (settings, versions) becomes a
            separate table.
        baselines: other spectra in the plot.
        metrics: rows of training metrics, from `read_metrics`; may be empty.
        curves: metrics to draw → their titles.
    """
    if not spectrum.points:
        raise AnywidthError(f"the spectrum {spectrum.name!r} has no points: nothing to report")
    metric = spectrum.metric()
    with style():
        figure = _plot(spectra_figure([spectrum, *baselines], metric))
        drawing = interactive_spectrum([spectrum, *baselines], metric, figure)
        parts = [_section("Spectrum", _spectrum_text(spectrum, metric) + drawing)]
        if timed_points(spectrum):
            drawing = interactive_latency(spectrum, _plot(latency_figure(spectrum)))
            parts.append(_section("Latency", _latency_text(spectrum) + drawing))
        if panels := "".join(map(_plot, curves_panels(metrics, curves or {}))):
            parts.append(_section("Training", f'<div class="panels">{panels}</div>'))
    for heading, sections in itertools.groupby(extra_sections, key=lambda one: one.title):
        parts.append(_section(heading, "".join(map(_extra, sections))))
    parts.append(_section("Widths", _width_table(spectrum, baselines, metric)))
    if run_summary:
        parts.append(_section("Run", _summary(run_summary)))
    if plan_text:
        explained = (
            "<p>Channels that narrow together are one group, named after its first layer.</p>"
        )
        parts.append(_section("Plan", f"{explained}<pre>{escape(plan_text)}</pre>"))
    page = _page(title, _tiles(spectrum, metric), "\n".join(parts))
    write_atomically(path, page.encode())


def _page(title: str, tiles: str, sections: str) -> str:
    styles = _read("report_page.css") + _read("report_page_spectrum.css")
    script = _read("report_page_spectrum.js") + _read("report_page.js")
    versions = (
        f"anywidth {__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>
{styles}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{tiles}
{sections}
<footer>Page written by {escape(versions)}.</footer>
</main>
<script>
{script}</script>
</body>
</html>
"""


def _read(file: str) -> str:
    return resources.files("anywidth.app.showing").joinpath(file).read_text("utf-8")


def _section(title: str, inside: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>"


def _spectrum_text(spectrum: Spectrum, metric: str) -> str:
    """What the drawing shows, in sentences."""
    said = ["One network, run at many widths: each dot is one width of the same weights."]
    if spectrum.kind == "i":
        said = ["Each dot is one width."]
    if spectrum.measured_on:
        said.append(f"Measured on {spectrum.measured_on}.")
    if any(standard_error(point, metric) for point in spectrum.points):
        said.append("Bars are one standard error: differences within them may be chance.")
    return _paragraph(said)


def _latency_text(spectrum: Spectrum) -> str:
    said = [f"Time of one example at each width: {latency_conditions(spectrum)}."]
    if any(point.latency_range for point in timed_points(spectrum)):
        said.append(
            "The widths took turns; dots are the mean of the fastest third of the passes, bars "
            "reach from the fastest to the median pass."
        )
    return _paragraph(said)


def _paragraph(sentences: Sequence[str]) -> str:
    return f"<p>{escape(' '.join(sentences))}</p>\n"


def _tiles(spectrum: Spectrum, metric: str) -> str:
    """The main metric and the cost at both ends of the widths."""
    by_cost = sorted(spectrum.points, key=lambda point: (point.macs, point.width or 0.0))
    narrowest, widest = by_cost[0], by_cost[-1]
    shown = [_tile(spectrum, widest, metric)]
    if narrowest.macs != widest.macs:
        shown.append(_tile(spectrum, narrowest, metric))
        fewer = f"{widest.macs / narrowest.macs:.1f} times"
        shown.append((fewer, "fewer multiply-adds at the narrowest width"))
    # Widths that round to the same channels are one network.
    count = len({(point.channels, point.macs, point.parameters) for point in spectrum.points})
    shown.append((str(count), f"{'network' if count == 1 else 'networks'} from one set of weights"))
    tiles = (
        f'<div class="tile"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in shown
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(spectrum: Spectrum, point: SpectrumPoint, metric: str) -> tuple[str, str]:
    shown = spectrum.describe(metric)
    where = "nonuniform" if point.width is None else f"at width {format_width(point.width)}"
    label = f"{shown.label} {where}, {format_count(point.macs)} multiply-adds"
    return format_point(point, metric, shown), label


def _plot(figure: Figure) -> str:
    """A figure as inline SVG; its text and grid use the colours of the page, light or dark."""
    text = figure_bytes(figure, "svg", transparent=True).decode()
    text = text[text.index("<svg") :]
    for color, name in ((INK, "ink"), (FAINT_INK, "faint"), (GRID, "line")):
        text = text.replace(color, f"var(--{name})")
    return f"<figure>{text}</figure>"


def _width_table(spectrum: Spectrum, baselines: Sequence[Spectrum], metric: str) -> str:
    """One row per width, with the baselines at the same width."""
    series = joined(baselines)
    has_latency = any(point.latency_ms is not None for point in spectrum.points)
    metrics = {name: spectrum.describe(name) for name in shown_metrics(spectrum)}
    labels = [shown.label for shown in metrics.values()]
    headings = ["width", *labels, "multiply-adds", "parameters"]
    headings += [spectrum.latency_label] * has_latency
    headings += [f"{one.name}, {spectrum.describe(metric).label}" for one in series]
    head = "".join(
        f'<th scope="col"><button type="button">{escape(heading)}</button></th>'
        for heading in headings
    )
    rows = []
    for point in spectrum.points:
        cells = [_cell(point.width, format_width(point.width))]
        for name, shown in metrics.items():
            cells.append(_cell(point.metrics.get(name), format_point(point, name, shown)))
        cells.append(_cell(point.macs, format_count(point.macs)))
        cells.append(_cell(point.parameters, format_count(point.parameters)))
        if has_latency:
            cells.append(_cell(point.latency_ms, format_metric(point.latency_ms)))
        for one in series:
            values = [] if point.width is None else values_at(one, point.width, metric)
            mean = statistics.mean(values) if values else None
            cells.append(_cell(mean, format_mean(values, spectrum.describe(metric))))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cell(value: float | None, text: str) -> str:
    known = value is not None and math.isfinite(value)
    return f'<td data-value="{value if known else ""}">{escape(text)}</td>'


def _summary(summary: Mapping[str, Any]) -> str:
    """Single values first, then each mapping as a table."""
    single = {name: value for name, value in summary.items() if not isinstance(value, Mapping)}
    tables = [_pairs(single)] if single else []
    for name, value in summary.items():
        if isinstance(value, Mapping):
            heading = f"<summary>{escape(str(name))}</summary>"
            tables.append(f"<details>{heading}\n{_pairs(value)}</details>")
    return "\n".join(tables)


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(str(value))}</td></tr>'
        for name, value in values.items()
    )
    return f'<table class="pairs"><tbody>\n{rows}\n</tbody></table>'


def _extra(section: Section) -> str:
    shown = "".join(_picture(*pair) for pair in section.images.items())
    pictures = f'<div class="pictures">{shown}</div>' if shown else ""
    caption = f'<p class="caption">{escape(section.caption)}</p>' if section.caption else ""
    return f"{section.html}{pictures}{caption}"


def _picture(label: str, image: bytes) -> str:
    source = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    text = "<br>".join(map(escape, label.splitlines()))
    return (
        f'<figure><img src="{source}" alt="{escape(label)}">'
        f"<figcaption>{text}</figcaption></figure>"
    )
