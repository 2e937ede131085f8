"""Train WDSR in six ways with the same number of steps, and compare PSNR over width.

    python -m benchmarks.super_resolution --train DIR --eval DIR --out DIR --parallel

Run it from the repository's root. `--eval` has one folder per set (Set5, Set14, BSD100). The six
are I-Nets at half and full width, and US-Nets with inplace distillation (l2, the task's default;
l1; l1 mixed with a share `--truth` of the true patches) and without. The record in
benchmarks/results has five of them, without l2. Each network is a run under `--out`. `--minutes 8`
stops it cleanly after eight minutes, and the same command continues it. `--parallel` trains all at
once, in one process each, because one network of this size does not fill a large GPU. The last
table is also in super_resolution.md, .csv, .json and .png under `--out`.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anywidth.app.runs.run import Run
from anywidth.app.showing.plots import plot_spectra
from anywidth.app.showing.spectrum_tables import format_count
from anywidth.app.studies.pieces import open_run, read_pieces, steps_per_second, train_piece
from anywidth.app.studies.provenance import provenance
from anywidth.app.tasks.results import run_spectrum, saved_spectrum
from anywidth.app.tasks.super_resolution.task import (
    SuperResolutionSettings,
    load_evaluation_sets,
    open_trained,
    train_run,
)
from anywidth.app.tasks.super_resolution.upscaling import evaluate_bicubic
from anywidth.distributed import local_device
from anywidth.errors import AnywidthError
from anywidth.files import write_atomically, write_json
from anywidth.measuring.spectra import Spectrum
from anywidth.measuring.width_lists import parse_widths
from benchmarks.parallel import work_in_parallel

NETWORKS: dict[str, dict[str, Any]] = {
    "i-0.5": {"method": "i", "width": 0.5},
    "i-1.0": {"method": "i", "width": 1.0},
    "us": {"method": "us", "distill": "l2", "truth": 0.0},
    "us-l1": {"method": "us", "distill": "l1", "truth": 0.0},
    "us-l1-truth": {"method": "us", "distill": "l1"},
    "us-no-distillation": {"method": "us", "distill": "none"},
}
LABELS = {
    "i-0.5": "I-WDSR",
    "i-1.0": "I-WDSR",
    "us": "US-WDSR",
    "us-l1": "US-WDSR, l1 distillation",
    "us-l1-truth": "US-WDSR, l1 distillation and truth",
    "us-no-distillation": "US-WDSR, no distillation",
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    network: str
    width: float | None
    channels: int | None
    multiply_adds: int | None
    parameters: int | None
    metrics: dict[str, float]


# ---- training and evaluating one network ---------------------------------------------------------


def settings_of(name: str, options: argparse.Namespace) -> SuperResolutionSettings:
    epochs = max(1, options.steps // 1000)
    choices = {"truth": options.truth, **NETWORKS[name]}
    return SuperResolutionSettings(
        channels=options.channels,
        blocks=options.blocks,
        data_dir=options.train,
        eval_dir=options.eval,
        epochs=epochs,
        steps_per_epoch=options.steps // epochs,
        batch_size=options.batch_size,
        patch=options.patch,
        learning_rate=options.learning_rate,
        warmup_steps=min(100, options.steps // 10),
        lattice=options.lattice,
        precision=options.precision,
        device=options.device,
        seed=options.seed,
        log_every=50,
        checkpoint_every=1000,
        **choices,
    )


def train_network(name: str, options: argparse.Namespace, deadline: float | None) -> bool:
    """Train a network until it is done or time is up; returns whether it is done."""
    settings = settings_of(name, options)
    run = open_run(options.out / name, settings)
    is_done, piece = train_piece(run, settings, train_run, deadline)
    if piece["steps"]:
        pace = options.batch_size * steps_per_second([piece])
        print(f"{name}: {piece['steps']} steps, {pace:,.0f} patches/s")
    return is_done


def evaluate_network(name: str, options: argparse.Namespace) -> None:
    """Write the spectrum of the run, unless it exists with these widths."""
    trained = open_trained(options.out / name, options.device)
    alone = trained.settings.method == "i"
    widths = trained.widths if alone else parse_widths(options.widths)
    if (trained.run.folder / "spectrum.json").exists():
        found = saved_spectrum(trained.run)
        if [point.width for point in found.points] == widths:
            return
    run_spectrum(trained, widths, measure_latency=False)


def work_on(name: str, options: argparse.Namespace, deadline: float | None) -> bool:
    if not train_network(name, options, deadline):
        return False
    evaluate_network(name, options)
    return True


# ---- the table -----------------------------------------------------------------------------------


def collect(options: argparse.Namespace) -> dict[str, Spectrum]:
    """The spectra of all finished networks."""
    found = {}
    for name in NETWORKS:
        if (options.out / name / "spectrum.json").exists():
            saved = saved_spectrum(Run.open(options.out / name))
            found[name] = replace(saved, name=LABELS[name])
    return found


def rows_of(spectra: dict[str, Spectrum], options: argparse.Namespace) -> list[Row]:
    sets = load_evaluation_sets(settings_of("us", options))
    rows = [Row("bicubic", None, None, None, None, evaluate_bicubic(sets))]
    for name, spectrum in spectra.items():
        for point in spectrum.points:
            channels = point.channels["head"]
            costs = point.macs, point.parameters
            rows.append(Row(name, point.width, channels, *costs, dict(point.metrics)))
    return rows


def findings(spectra: dict[str, Spectrum], metric: str = "psnr") -> list[str]:
    """How the networks compare, in dB of the mean over the sets."""
    lines = []
    slimmable = {name: found for name, found in spectra.items() if name.startswith("us")}
    for us, found in slimmable.items():
        for name, width in (("i-0.5", 0.5), ("i-1.0", 1.0)):
            if name in spectra:
                difference = found.at(width).metrics[metric]
                difference -= spectra[name].points[0].metrics[metric]
                lines.append(f"{us} less I-Net at width {width}: {difference:+.3f} dB")
    plain = slimmable.pop("us-no-distillation", None)
    for us, found in slimmable.items() if plain is not None else ():
        gains = [
            point.metrics[metric] - plain.at(point.width).metrics[metric]
            for point in found.points
            if point.width is not None
        ]
        mean = sum(gains) / len(gains)
        lines.append(f"{us} less none: {mean:+.3f} dB, {min(gains):+.3f} at the worst width")
    for name, spectrum in spectra.items():
        values = [p.metrics[metric] for p in sorted(spectrum.points, key=lambda p: p.macs)]
        falls = [a - b for a, b in itertools.pairwise(values) if b < a]
        if len(values) > 1:
            lines.append(
                f"{name}: {values[0]:.3f} to {values[-1]:.3f} dB, "
                + (f"falls by up to {max(falls):.3f} dB" if falls else "rises at every step")
            )
    return lines


def facts_of(options: argparse.Namespace) -> dict[str, Any]:
    runs = {name: options.out / name for name in NETWORKS if (options.out / name).is_dir()}
    device = local_device(options.device)
    return {
        "command": shlex.join(["python", "-m", "benchmarks.super_resolution", *sys.argv[1:]]),
        **provenance(device),
        "precision": options.precision,
        "engine": "CUDA graphs" if device.type == "cuda" else "eager",
        "truth": options.truth,
        "seed": options.seed,
        "steps": settings_of("us", options).epochs * settings_of("us", options).steps_per_epoch,
        "parallel": options.parallel,
        "patches_per_second": {
            name: round(options.batch_size * steps_per_second(read_pieces(folder)), 1)
            for name, folder in runs.items()
        },
    }


def to_markdown(rows: Sequence[Row], facts: dict[str, Any], lines: Sequence[str]) -> str:
    metrics = list(rows[0].metrics)
    headings = ["network", "width", "channels", "multiply-adds", *map(_heading, metrics)]
    table = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for row in rows:
        costs = "" if row.multiply_adds is None else format_count(row.multiply_adds)
        width, channels = ("" if v is None else str(v) for v in (row.width, row.channels))
        values = [f"{row.metrics[m]:.{2 if 'psnr' in m else 4}f}" for m in metrics]
        table.append([row.network, width, channels, costs, *values])
    text = ["| " + " | ".join(cells) + " |" for cells in table]
    pages = [f"{name}: {value}" for name, value in facts.items()]
    return "\n".join([*pages, "", *lines, "", *text, ""])


def _heading(metric: str) -> str:
    name, _, group = metric.partition("_")
    return f"{name.upper()} {group}".strip()


def to_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    costs = ["network", "width", "channels", "multiply_adds", "parameters"]
    writer.writerow([*costs, *rows[0].metrics])
    for row in rows:
        values = [round(value, 5) for value in row.metrics.values()]
        writer.writerow([*(getattr(row, name) for name in costs), *values])
    return text.getvalue()


def draw(spectra: dict[str, Spectrum], bicubic: dict[str, float], steps: int, stem: Path) -> None:
    """Draw the mean over the sets, and each set, for the networks that learned.

    A network that is not better than bicubic is left out, because it would squeeze the others.
    """
    learned = [s for s in spectra.values() if s.points[-1].metrics["psnr"] > bicubic["psnr"]]
    if not learned:
        return
    title = f"x2 super-resolution, {steps} steps"
    for suffix in (".png", ".svg"):
        plot_spectra(learned, stem.with_suffix(suffix), "psnr", title)
    for metric in bicubic:
        kind, _, group = metric.partition("_")
        if kind == "psnr" and group:
            path = stem.with_name(f"{stem.name}_{group.lower()}.svg")
            plot_spectra(learned, path, metric, f"{title}, {group}")


def summarise(options: argparse.Namespace) -> None:
    spectra = collect(options)
    rows = rows_of(spectra, options)
    facts, lines = facts_of(options), findings(spectra)
    stem = options.out / "super_resolution"
    text = to_markdown(rows, facts, lines)
    write_atomically(stem.with_suffix(".md"), text.encode())
    write_atomically(stem.with_suffix(".csv"), to_csv(rows).encode())
    write_json(
        stem.with_suffix(".json"), {**facts, "findings": lines, "rows": [vars(r) for r in rows]}
    )
    draw(spectra, rows[0].metrics, facts["steps"], stem)
    missing = [name for name in NETWORKS if name not in spectra]
    if missing:
        print(f"not done yet: {', '.join(missing)}; the same command goes on with them")
    print(text)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", required=True, help="folder of training pictures")
    parser.add_argument("--eval", required=True, help="folder with one subfolder per set")
    parser.add_argument("--out", required=True, type=Path, help="folder for runs and results")
    parser.add_argument("--steps", type=int, default=20_000, help="training steps of each network")
    parser.add_argument(
        "--minutes", type=float, help="stop after so many minutes; the same command continues"
    )
    parser.add_argument("--only", choices=NETWORKS, action="append", help="may be repeated")
    parser.add_argument("--parallel", action="store_true", help="one process per network")
    parser.add_argument("--widths", default="0.5:1.0:0.0625", help="widths of the US-Nets' spectra")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--patch", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--truth", type=float, default=0.9, help="share of the true patches in us-l1-truth"
    )
    parser.add_argument("--lattice", type=int, help="number of configurations to draw widths from")
    parser.add_argument("--precision", default="auto", help="auto, float32, tf32 or bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-table", action="store_true", help="train and evaluate only")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    started = time.time()
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.only or list(NETWORKS)
    if options.parallel and len(names) > 1:
        work_in_parallel("benchmarks.super_resolution", names, arguments)
    else:
        deadline = None if options.minutes is None else started + 60 * options.minutes
        for name in names:
            if not work_on(name, options, deadline):
                print(f"{name}: stopped before its end; the same command goes on with it")
                break
    if not options.no_table:
        summarise(options)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except AnywidthError as error:
        raise SystemExit(f"benchmarks.super_resolution: {error}") from None
