"""A study's results as a table: Markdown with the paper's numbers beside ours, and CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from anywidth.app.showing.spectrum_tables import format_count, format_mean, format_width
from anywidth.app.studies.comparing import METRIC, SHOWN, Finding, Line, Results
from anywidth.app.studies.paper import paper_errors
from anywidth.app.studies.study_parts import Network, Setting, Study
from anywidth.app.studies.trainings import read_measurement, run_folder
from anywidth.measuring.spectra import Spectrum, joined, values_at

_COLUMNS = ("network", "setting", "seed", "width", "multiply_adds", "parameters", "top1_error",
            "top5_error", "loss", "paper_top1_error")  # fmt: skip


def collect(
    study: Study,
    seeds: int,
    out: Path,
    classes: int | None = None,
    test_images: int | None = None,
) -> Results:
    """Read the measurements of a study from disk; `classes`, `test_images` as in `Results`."""
    spectra: dict[Line, dict[int, Spectrum]] = {}
    paper: dict[Line, dict[float, float]] = {}
    for setting in study.settings:
        line = (setting.network.name, setting.label)
        spectra[line] = {seed: _spectrum(setting, seed, out) for seed in range(seeds)}
        if setting.paper is not None:
            table, name = setting.paper
            paper[line] = paper_errors(table, setting.network.name, name)
    return Results(spectra, paper, classes, test_images)


def _spectrum(setting: Setting, seed: int, out: Path) -> Spectrum:
    parts = [
        read_measurement(run_folder(out, training, seed), setting.measurement, setting.part)
        for training in setting.trainings
    ]
    points = [point for one in joined(parts) for point in one.points]
    return Spectrum(setting.label, tuple(points), setting.kind)


def to_csv(results: Results) -> str:
    """One row per network, setting, seed and width."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for (network, label), by_seed in results.spectra.items():
        printed = results.paper.get((network, label), {})
        for seed, spectrum in by_seed.items():
            for point in spectrum.points:
                metrics = [round(point.metrics[name], 5) for name in _COLUMNS[6:9]]
                theirs = printed.get(point.width) if point.width is not None else None
                place = [network, label, seed, point.width, point.macs, point.parameters]
                writer.writerow([*place, *metrics, theirs])
    return text.getvalue()


def to_markdown(
    study: Study,
    results: Results,
    facts: Mapping[str, str],
    found: Sequence[Finding],
) -> str:
    """The page of a study: how it was made, tables, findings and figures."""
    lines = [f"# {study.name}", "", _heading(study), ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for network in study.networks:
        lines += ["", f"## {network.title}, top-1 error in percent", ""]
        lines += _table(study, network, results)
    lines += ["", "## Findings", "", *(f"- {finding}" for finding in found)]
    lines += ["", "## Figures", ""]
    lines += [f"![{picture.title}]({picture.file}.png)" for picture in study.figures()]
    return "\n".join([*lines, ""])


def _heading(study: Study) -> str:
    return f"{study.place[0].upper()}{study.place[1:]}: {study.compares}."


def _table(study: Study, network: Network, results: Results) -> list[str]:
    columns = study.columns(network)
    settings = [setting for setting in study.settings if setting.network == network]
    known = [set(results.widths((network.name, setting.label))) for setting in settings]
    common = [width for width in columns if all(width in widths for widths in known)]
    mean = "mean" if len(common) == len(columns) else f"mean from {format_width(common[0])}"
    rows = [["", *map(format_width, columns), mean]]
    rows.append(["---", *["---:"] * (len(columns) + 1)])
    rows.append(["multiply-adds", *_costs(settings, columns, results), ""])
    for setting in settings:
        line = (network.name, setting.label)
        ours = [format_mean(_errors(results, line, width), SHOWN) for width in columns]
        rows.append([setting.label, *ours, format_mean(results.errors(line, common), SHOWN)])
        printed = results.paper.get(line)
        if printed:
            theirs = [f"*{printed[w]:.1f}*" if w in printed else "" for w in columns]
            average = results.paper_error(line, common)
            shown = "" if average is None else f"*{average:.1f}*"
            rows.append(["*paper, ImageNet*", *theirs, shown])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _errors(results: Results, line: Line, width: float) -> list[float]:
    spectra = results.seeds(line).values()
    return [value for one in spectra for value in values_at(one, width, METRIC)]


def _costs(settings: Sequence[Setting], columns: Sequence[float], results: Results) -> list[str]:
    """The multiply-adds of each width, from the first setting that has it."""
    cells = []
    for width in columns:
        points = [
            point
            for setting in settings
            for one in results.seeds((setting.network.name, setting.label)).values()
            for point in one.points
            if point.width == width
        ]
        cells.append(format_count(points[0].macs) if points else "")
    return cells


def mean_spectrum(by_seed: Mapping[int, Spectrum]) -> Spectrum:
    """The mean over the seeds, point by point."""
    spectra = list(by_seed.values())
    points = []
    for index, point in enumerate(spectra[0].points):
        same = [one.points[index] for one in spectra]
        metrics = {
            name: statistics.mean(other.metrics[name] for other in same) for name in point.metrics
        }
        points.append(replace(point, metrics=metrics, latency_ms=None))
    return Spectrum(spectra[0].name, tuple(points), spectra[0].kind)
