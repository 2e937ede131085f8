"""The paper's figure of three panels: curves of I-Nets, curves of the US-Net, both at the end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anywidth.app.runs.metrics import read_metrics
from anywidth.app.showing.figure_style import INK, figure_bytes, style
from anywidth.app.showing.spectrum_tables import format_count
from anywidth.files import write_atomically
from anywidth.measuring.spectra import Spectrum

Key = tuple[str, int]
"""A network's name and a seed."""

COLORS = {0.25: "#e0762a", 0.5: "#b05fc0", 0.75: "#2a9d73", 1.0: "#2f7fd1"}


def draw(
    folders: Mapping[Key, Path], spectra: Mapping[Key, Spectrum], title: str, stem: Path
) -> None:
    """Write the figure as PNG and SVG: the mean over the seeds, with each seed in a faint line."""
    metrics = {key: folder / "metrics.csv" for key, folder in folders.items()}
    rows = {key: read_metrics(path) for key, path in metrics.items() if path.exists()}
    with style():
        figure = Figure(figsize=(12.5, 4.2), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        _curves(left, [found for (name, _), found in rows.items() if name != "us"])
        _curves(middle, [found for (name, _), found in rows.items() if name == "us"])
        left.set_title("I-Nets")
        middle.set_title("US-Net")
        middle.sharey(left)
        _ends(right, spectra)
        right.set_title("At the end")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        for form in ("png", "svg"):
            write_atomically(stem.with_suffix(f".{form}"), figure_bytes(figure, form))


def _curves(axes: Axes, runs: Sequence[Sequence[Mapping[str, float]]]) -> None:
    """Mean scores during training; not smoothed."""
    for width, color in COLORS.items():
        column = f"score/{width}"
        lines = [
            {row["agent_steps"]: row[column] for row in rows if column in row} for rows in runs
        ]
        lines = [line for line in lines if line]
        if len(lines) > 1:
            for line in lines:
                axes.plot(list(line), list(line.values()), color=color, alpha=0.25, linewidth=1)
        shared = sorted(set.intersection(*map(set, lines))) if lines else []
        means = [statistics.mean(line[step] for line in lines) for step in shared]
        if shared:
            axes.plot(shared, means, color=color, label=f"{width}")
    axes.set_xlabel("agent steps")
    axes.xaxis.set_major_formatter(lambda value, position: format_count(value))
    axes.set_ylabel("mean score of full games")
    if axes.lines:
        axes.legend(title="width", labelcolor=INK)


def _ends(axes: Axes, spectra: Mapping[Key, Spectrum]) -> None:
    looks: dict[str, tuple[str, dict[str, Any]]] = {
        "us": ("US-Net", {"color": "#2f7fd1", "marker": "o"}),
        "i": ("I-Nets", {"color": "#e0762a", "marker": "D", "linestyle": "--"}),
        "sliced": ("I-Net 1.0, sliced", {"color": "#8a929b", "marker": "x", "linestyle": ":"}),
    }
    for kind, (label, look) in looks.items():
        found: dict[float, list[tuple[float, float]]] = {}
        for (name, _), spectrum in spectra.items():
            if name.partition("-")[0] == kind:
                for point in spectrum.points:
                    metrics = point.metrics
                    score = metrics["score"], metrics["score_standard_error"]
                    found.setdefault(point.width or 1.0, []).append(score)
        widths = sorted(found)
        means = [statistics.mean(score for score, _ in found[width]) for width in widths]
        errors = [_error(found[width]) for width in widths]
        if widths:
            axes.errorbar(widths, means, errors, capsize=3, label=label, **look)
    axes.set_xlabel("width")
    axes.set_ylabel("mean score of full games")
    axes.set_xticks(list(COLORS))
    if spectra:
        axes.legend(labelcolor=INK)


def _error(scores: Sequence[tuple[float, float]]) -> float:
    """Standard error of the mean: over seeds if there are several, else over games."""
    if len(scores) == 1:
        return scores[0][1]
    return statistics.stdev(score for score, _ in scores) / len(scores) ** 0.5
