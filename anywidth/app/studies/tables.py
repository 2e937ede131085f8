"""A study's results as a table: Markdown with the paper's numbers beside ours, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from anywidth.app.showing.spectrum_tables import (
    format_count,
    format_mean,
    format_point,
    format_width,
)
from anywidth.app.studies.comparing import Finding, Line, Results
from anywidth.app.studies.paper import paper_errors
from anywidth.app.studies.study_parts import Network, Setting, Study
from anywidth.app.studies.trainings import read_measurement, run_folder
from anywidth.measuring.spectra import STANDARD_ERROR, Metric, Spectrum

_COLUMNS = ("network", "setting", "seed", "width", "multiply_adds", "parameters")


def collect(
    study: Study, seeds: int, out: Path, classes: int | None = None, test_images: int | None = None
) -> Results:
    """Read the measurements of a study from disk; `classes`, `test_images` as in `Results`."""
    metrics = study.task.trained.metrics
    spectra: dict[Line, dict[int, Spectrum]] = {}
    paper: dict[Line, dict[float, float]] = {}
    for setting in study.settings:
        line = (setting.network.name, setting.label)
        spectra[line] = {seed: _spectrum(setting, seed, out, metrics) for seed in range(seeds)}
        if setting.paper is not None:
            table, name = setting.paper
            paper[line] = paper_errors(table, setting.network.name, name)
    return Results(spectra, paper, classes, test_images, metrics)


def _spectrum(setting: Setting, seed: int, out: Path, metrics: Mapping[str, Metric]) -> Spectrum:
    folders = (run_folder(out, training, seed) for training in setting.trainings)
    parts = (read_measurement(one, setting.measurement, setting.part, metrics) for one in folders)
    points = tuple(point for part in parts for point in part.points)
    return Spectrum(setting.label, points, setting.kind, metrics)


def to_csv(results: Results) -> str:
    """One row per network, setting, seed and width."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metrics = _metrics(results)
    writer.writerow([*_COLUMNS, *metrics, f"paper_{results.metric}"])
    for (network, label), by_seed in results.spectra.items():
        printed = results.paper.get((network, label), {})
        for seed, spectrum in by_seed.items():
            for point in spectrum.points:
                # Earlier measurements have no standard errors.
                rounded = {name: round(value, 5) for name, value in point.metrics.items()}
                place = [network, label, seed, point.width, point.macs, point.parameters]
                theirs = None if point.width is None else printed.get(point.width)
                writer.writerow([*place, *map(rounded.get, metrics), theirs])
    return text.getvalue()


def _metrics(results: Results) -> list[str]:
    """All metrics of the measurements."""
    spectra = (one for by_seed in results.spectra.values() for one in by_seed.values())
    return list(dict.fromkeys(name for one in spectra for name in one.metrics))


def _tabled(study: Study, results: Results) -> list[str]:
    """The metrics with tables: the main one, also of each picture set, and those drawn."""
    main, drawn = results.metric, study.task.trained.drawn
    return [
        name
        for name in _metrics(results)
        if (name in (main, *drawn) or name.startswith(f"{main}_"))
        and not name.endswith(STANDARD_ERROR)
    ]


def to_markdown(
    study: Study,
    results: Results,
    facts: Mapping[str, str],
    found: Sequence[Finding],
    curves: str | None = None,
) -> str:
    """The page of a study: how it was made, tables, findings and figures."""
    place = study.place[0].upper() + study.place[1:]
    lines = [f"# {study.name}", "", f"{place}: {study.compares}.", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for network in study.networks:
        for metric in _tabled(study, results):
            label = results.describe(metric).label
            words = label.replace(", %", " in percent").replace(", dB", " in dB")
            lines += ["", f"## {network.title}, {words}", ""]
            lines += _table(study, network, results, metric)
    lines += ["", "## Findings", "", *(f"- {finding}" for finding in found)]
    lines += ["", "## Figures", ""]
    lines += [f"![{picture.title}]({picture.file}.png)" for picture in study.figures()]
    lines += [f"![Learning curves]({curves}.png)"] if curves else []
    return "\n".join([*lines, ""])


def _table(study: Study, network: Network, results: Results, metric: str) -> list[str]:
    columns = study.widths or network.widths
    settings = [setting for setting in study.settings if setting.network == network]
    known = [set(results.widths((network.name, setting.label))) for setting in settings]
    common = [width for width in columns if all(width in widths for widths in known)]
    mean = "mean" if len(common) == len(columns) else f"mean from {format_width(common[0])}"
    rows = [["", *map(format_width, columns), mean]]
    rows.append(["---", *["---:"] * (len(columns) + 1)])
    rows.append(["multiply-adds", *(_cost(settings, width, results) for width in columns), ""])
    for setting in settings:
        line = (network.name, setting.label)
        ours = [_cell(results, line, width, metric) for width in columns]
        means = list(results.means(line, common, metric).values())
        rows.append([setting.label, *ours, format_mean(means, results.describe(metric))])
        printed = results.paper.get(line)
        if printed:
            theirs = [f"*{printed[w]:.1f}*" if w in printed else "" for w in columns]
            average = results.paper_error(line, common)
            shown = "" if average is None else f"*{average:.1f}*"
            rows.append(["*paper, ImageNet*", *theirs, shown])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _cell(results: Results, line: Line, width: float, metric: str) -> str:
    """The mean over the seeds with their deviation, or one seed with its own standard error."""
    shown, points = results.describe(metric), results.points(line, width)
    if len(points) == 1:
        return format_point(points[0], metric, shown)
    return format_mean([point.metrics[metric] for point in points], shown)


def _cost(settings: Sequence[Setting], width: float, results: Results) -> str:
    """The multiply-adds of a width, from the first setting that has it."""
    lines = ((setting.network.name, setting.label) for setting in settings)
    points = (point for line in lines for point in results.points(line, width))
    return next((format_count(point.macs) for point in points), "")
