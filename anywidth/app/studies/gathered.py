"""Figures 4 and 5: what the super-resolution and reinforcement benchmarks measured, gathered."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anywidth.app.showing.plots import plot_spectra
from anywidth.app.showing.spectrum_tables import format_count, format_metric, format_width
from anywidth.app.studies.comparing import Finding, judge
from anywidth.app.tasks.reinforcement.task import TrainedPolicy
from anywidth.app.tasks.super_resolution.task import TrainedUpscaler
from anywidth.errors import AnywidthError
from anywidth.files import make_folder, read_json, write_atomically
from anywidth.measuring.spectra import STANDARD_ERROR, Spectrum, SpectrumPoint
from anywidth.width import ChannelConfig

RESULTS = Path("benchmarks/results")
# Networks whose PSNR differs by no more are close, in dB.
CLOSE = 0.05
_SEVERAL_SEEDS = (
    "With several seeds the deviation of their differences decides, as in the other studies."
)

_METRICS = {**TrainedUpscaler.metrics, **TrainedPolicy.metrics}
_COLUMNS = ("network", "seed", "width", "multiply_adds", "parameters")
# How the name of an ordinary network ends that was cut to narrower widths.
SLICED = ", sliced"
WITHOUT_DISTILLATION = "US-Net without distillation"
_NAMES = {
    "us": "US-Net",
    "us-l1": "US-Net, l1 distillation",
    "us-l1-truth": "US-Net, l1 distillation and truth",
    "us-no-distillation": WITHOUT_DISTILLATION,
}


@dataclass(frozen=True)
class Row:
    """One network at one width, as a benchmark recorded it."""

    network: str
    seed: int
    width: float | None
    multiply_adds: int | None
    parameters: int | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class GatheredStudy:
    """A figure of the paper whose networks a benchmark trains.

    Args:
        name: on the command line.
        source: where in the paper it is.
        compares: what is compared, in a line.
        file: what the benchmark writes.
        command: what to run where that is missing.
        metric: the one that is drawn.
        find: which of the paper's findings hold.
        rule: when they do, in words.
    """

    name: str
    source: str
    compares: str
    file: str
    command: str
    metric: str
    find: Callable[[Sequence[Row]], list[Finding]]
    rule: str

    @property
    def place(self) -> str:
        """Where in the paper it is, in words."""
        return f"{self.source} of the paper"

    @property
    def stem(self) -> str:
        """Of the files it writes: not those of the benchmark, which may lie beside them."""
        return f"{self.source.replace(' ', '-')}-{self.name}"


def find_record(study: GatheredStudy, out: Path) -> Path:
    """The benchmark's record under the studies' folder, or in the repository."""
    stem = Path(study.file).stem
    places = [folder / study.file for folder in (out / stem, RESULTS, RESULTS / stem)]
    for place in places:
        if place.is_file():
            return place
    raise AnywidthError(
        f"the study {study.name} gathers what a benchmark recorded in {study.file}, and there is "
        f"no such file at {', '.join(str(place.absolute()) for place in places)}; make it, in a "
        f"clone of the repository, with: {study.command} --out {(out / stem).absolute()}"
    )


def gather(study: GatheredStudy, out: Path) -> tuple[Path, list[Finding]]:
    """Writes a page, a CSV file and a figure from a benchmark's record; returns page, findings.

    The figure is the benchmark's own where it drew one.
    """
    record = find_record(study, out)
    data = read_json(record)
    rows = rows_of(data, record)
    found = study.find(rows)
    make_folder(out)
    page = out / f"{study.stem}.md"
    write_atomically(page, _markdown(study, data, rows, found, record).encode())
    write_atomically(out / f"{study.stem}.csv", _csv(rows).encode())
    for form in ("png", "svg"):
        drawn, target = record.with_suffix(f".{form}"), out / f"{study.stem}.{form}"
        if drawn.is_file():
            write_atomically(target, drawn.read_bytes())
        else:
            plot_spectra(_spectra(rows), target, study.metric, study.name)
    return page, found


def rows_of(data: Mapping[str, Any], record: Path) -> list[Row]:
    """The rows of a record; metrics may lie in a field of that name or beside the others."""
    try:
        return [_row(row) for row in data["rows"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise AnywidthError(
            f"{record}: no rows of {', '.join(_COLUMNS)} and metrics "
            f"({type(error).__name__}: {error}); make it anew with the benchmark"
        ) from error


def _row(row: Mapping[str, Any]) -> Row:
    network = "I-Net" if row["network"].startswith("i-") else row["network"]
    others = {name: value for name, value in row.items() if name not in (*_COLUMNS, "channels")}
    return Row(
        _NAMES.get(network, network),
        row.get("seed", 0),
        row["width"],
        row["multiply_adds"],
        row["parameters"],
        dict(row.get("metrics", others)),
    )


# ---- what holds ----------------------------------------------------------------------------------


def super_resolution_findings(rows: Sequence[Row]) -> list[Finding]:
    """The paper: within 0.01 dB of individual networks, slightly worse without distillation."""
    present = [name for name in _NAMES.values() if any(row.network == name for row in rows)]
    found = [finding for name in present for finding in _near_individual(rows, name)]
    for name in present:
        if name != WITHOUT_DISTILLATION:
            found += _gain_of_distillation(rows, name)
    return found


def _near_individual(rows: Sequence[Row], name: str) -> list[Finding]:
    found = []
    for width in (0.5, 1.0):
        losses = [-one for one in _differences(rows, name, "I-Net", [width], "psnr").values()]
        if losses:
            text = (
                f"{name}: one network for all widths is close to an individual one at width "
                f"{width}: {_decibels(losses)} (paper: 0.01 dB below)."
            )
            found.append(Finding(judge(losses, CLOSE), text))
    return found


def _gain_of_distillation(rows: Sequence[Row], name: str) -> list[Finding]:
    widths = [
        width
        for width in sorted({row.width for row in rows if row.width is not None})
        if _differences(rows, name, WITHOUT_DISTILLATION, [width], "psnr")
    ]
    gains = _differences(rows, name, WITHOUT_DISTILLATION, widths, "psnr")
    if not gains:
        return []
    losses = [-one for one in gains.values()]
    text = (
        f"{name}: without inplace distillation it is slightly worse: with it, {_decibels(losses)} "
        f"in the mean over {len(widths)} widths (paper: slightly above)."
    )
    return [Finding(judge(losses, noise=CLOSE), text)]


def reinforcement_findings(rows: Sequence[Row]) -> list[Finding]:
    """The paper: the US-Net outperforms four individually trained networks at every width."""
    found = []
    names = ("US-Net", "I-Net")
    for width in (0.25, 0.5, 0.75, 1.0):
        gains = _differences(rows, *names, [width], "score")
        if not gains:
            continue
        ours, alone = (
            statistics.mean(_by_seed(rows, name, width, "score").values()) for name in names
        )
        noise = _error_of_difference(rows, names, width, "score") if len(gains) == 1 else 0.0
        spread = f"difference ± {noise:.1f} over the games, one seed" if noise else "one seed"
        if len(gains) > 1:
            deviation = statistics.stdev(gains.values())
            spread = f"difference ± {deviation:.1f} over {len(gains)} seeds"
        text = (
            "One network for all widths scores higher than an individual one at width "
            f"{width}: {ours:.1f} against {alone:.1f} ({spread}; paper: higher at all four widths)."
        )
        found.append(Finding(judge([-one for one in gains.values()], noise=noise), text))
    return found


def _differences(
    rows: Sequence[Row], one: str, other: str, widths: Sequence[float], metric: str
) -> dict[int, float]:
    """Seed by seed, of those that have all widths of both networks: the mean over the widths."""
    pairs = [
        (_by_seed(rows, one, width, metric), _by_seed(rows, other, width, metric))
        for width in widths
    ]
    common = set.intersection(*({*ours} & {*theirs} for ours, theirs in pairs)) if pairs else set()
    return {
        seed: statistics.mean(ours[seed] - theirs[seed] for ours, theirs in pairs)
        for seed in sorted(common)
    }


def _by_seed(rows: Sequence[Row], network: str, width: float, metric: str) -> dict[int, float]:
    return {
        row.seed: row.metrics[metric]
        for row in rows
        if row.network == network
        and row.width is not None
        and abs(row.width - width) < 1e-9
        and metric in row.metrics
    }


def _error_of_difference(
    rows: Sequence[Row], networks: Sequence[str], width: float, metric: str
) -> float:
    """The standard error of the difference of two means; 0 where none was recorded."""
    name = f"{metric}{STANDARD_ERROR}"
    errors = [error for one in networks for error in _by_seed(rows, one, width, name).values()]
    return math.hypot(*errors)


def _decibels(losses: Sequence[float]) -> str:
    mean = statistics.mean(losses)
    text = f"{abs(mean):.4f} dB {'below' if mean > 0 else 'above'}"
    return text if len(losses) == 1 else f"{text}, ± {statistics.stdev(losses):.4f},"


GATHERED: tuple[GatheredStudy, ...] = (
    GatheredStudy(
        "super-resolution",
        "figure 4",
        "WDSR trained for all widths, with and without distillation, and individually",
        "super_resolution.json",
        "python -m benchmarks.super_resolution --train DIR --eval DIR",
        "psnr",
        super_resolution_findings,
        f"Close means at most {CLOSE} dB below. With one seed a difference under {CLOSE} dB is too "
        f"close to call. {_SEVERAL_SEEDS}",
    ),
    GatheredStudy(
        "reinforcement",
        "figure 5",
        "PPO on Breakout, one network for all widths and four individual ones",
        "reinforcement.json",
        "python -m benchmarks.reinforcement",
        "score",
        reinforcement_findings,
        "With one seed a difference under its standard error over the games is too close to call; "
        "that error knows nothing of how much one training differs from the next. "
        f"{_SEVERAL_SEEDS}",
    ),
)


# ---- files ---------------------------------------------------------------------------------------


def _spectra(rows: Sequence[Row]) -> list[Spectrum]:
    series: dict[str, list[SpectrumPoint]] = {}
    for row in rows:
        if row.width is not None and row.multiply_adds is not None:
            costs = row.multiply_adds, row.parameters or 0
            point = SpectrumPoint(row.width, ChannelConfig(()), *costs, row.metrics)
            series.setdefault(row.network, []).append(point)
    return [Spectrum(name, tuple(points), _kind(name), _METRICS) for name, points in series.items()]


def _kind(name: str) -> str:
    if name.endswith(SLICED):
        return "control"
    return "i" if name == "I-Net" else "us"


def _markdown(
    study: GatheredStudy,
    data: Mapping[str, Any],
    rows: Sequence[Row],
    found: Sequence[Finding],
    record: Path,
) -> str:
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    names = ["network", "seed", "width", "multiply-adds"]
    table = [names + [name.replace("_", " ") for name in metrics]]
    table.append(["---", *["---:"] * (len(table[0]) - 1)])
    for row in rows:
        cost = "" if row.multiply_adds is None else format_count(row.multiply_adds)
        width = "" if row.width is None else format_width(row.width)
        values = [format_metric(row.metrics.get(name), _METRICS.get(name)) for name in metrics]
        table.append([row.network, str(row.seed), width, cost, *values])
    left_out = ("rows", "findings", "configuration")
    facts = [(name, value) for name, value in data.items() if name not in left_out]
    heading = f"{study.place.capitalize()}: {study.compares}."
    lines = [f"# {study.name}", "", heading, ""]
    lines += [f"- {name.replace('_', ' ')}: {value}" for name, value in facts]
    lines += [f"- record: {record}", "", *("| " + " | ".join(cells) + " |" for cells in table)]
    lines += ["", "## What holds", "", study.rule, "", *(f"- {finding}" for finding in found)]
    return "\n".join([*lines, "", f"![{study.name}]({study.stem}.png)", ""])


def _csv(rows: Sequence[Row]) -> str:
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, *metrics])
    for row in rows:
        values = [row.metrics.get(name) for name in metrics]
        writer.writerow([*(getattr(row, name) for name in _COLUMNS), *values])
    return text.getvalue()
