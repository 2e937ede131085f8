"""Train US-PPO and four individual networks with the same number of agent steps, and compare them.

    python -m benchmarks.reinforcement --steps 3000000 --minutes 9 --parallel --out DIR

Run it from the repository's root. It trains a US-Net and I-Nets at 0.25, 0.5, 0.75 and 1.0 on
BreakoutNoFrameskip-v4 (`--recipe rl` is MinAtar's Breakout, for a CPU). Each network is a run under
`--out`. `--minutes 9` stops it cleanly after nine minutes; the same command continues it, and plays
the final games of finished networks. `--parallel` trains all at once, in one process each. The last
table is also in reinforcement.md, .csv and .json under `--out`, and the paper's figure (I-Nets,
US-Net, final scores) in reinforcement.png and .svg.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anywidth.app.runs.run import Run
from anywidth.app.runs.settings import override, to_json
from anywidth.app.showing.spectrum_tables import format_count
from anywidth.app.studies.pieces import open_run, read_pieces, steps_per_second, train_piece
from anywidth.app.studies.provenance import provenance
from anywidth.app.tasks.registry import recipe
from anywidth.app.tasks.reinforcement.task import ReinforcementSettings, open_trained, train_run
from anywidth.app.tasks.results import run_spectrum, saved_spectrum
from anywidth.distributed import local_device
from anywidth.errors import AnywidthError
from anywidth.files import read_json, write_atomically, write_json
from anywidth.measuring.spectra import Spectrum, SpectrumPoint, spectrum
from benchmarks.parallel import work_in_parallel
from benchmarks.reinforcement_figure import draw

WIDTHS = (0.25, 0.5, 0.75, 1.0)
NETWORKS: dict[str, dict[str, str]] = {
    "us": {"method": "us"},
    **{f"i-{width}": {"method": "i", "width": str(width)} for width in WIDTHS},
}
LABELS = {"us": "US-Net", "i": "I-Net", "sliced": "I-Net 1.0, sliced"}
SPECTRUM, SLICED = "spectrum.json", "sliced.json"
# Fields that do not change the result: a run may continue elsewhere.
CIRCUMSTANCES = {"device", "threads", "precision"}


@dataclass(frozen=True)
class Row:
    """One line of the table: the games of one network at one width."""

    network: str
    seed: int
    width: float
    multiply_adds: int
    parameters: int
    score: float
    score_standard_error: float
    greedy_score: float
    greedy_score_standard_error: float


# ---- training and evaluating one network ---------------------------------------------------------


def settings_of(name: str, seed: int, options: argparse.Namespace) -> ReinforcementSettings:
    settings = recipe(options.recipe)
    if not isinstance(settings, ReinforcementSettings):
        raise AnywidthError(f"--recipe {options.recipe}: expected rl or rl_breakout")
    changes = {"steps": options.steps, "seed": seed, "device": options.device}
    given = {field: str(value) for field, value in changes.items() if value is not None}
    settings = override(settings, {**given, **dict(options.set), **NETWORKS[name]})
    points = max(1, options.points)
    rollouts = math.ceil(settings.steps / (settings.environments * settings.rollout))
    every = {"validate_every": str(math.ceil(rollouts / points))}
    return settings if "validate_every" in dict(options.set) else override(settings, every)


def folder_of(name: str, seed: int, options: argparse.Namespace) -> Path:
    return Path(options.out / f"{name}-seed{seed}")


def train_network(
    name: str, seed: int, options: argparse.Namespace, deadline: float | None
) -> bool:
    """Train a network until it is done or time is up; returns whether it is done."""
    settings = settings_of(name, seed, options)
    run = open_run(folder_of(name, seed, options), settings, CIRCUMSTANCES)
    is_done, piece = train_piece(run, settings, train_run, deadline)
    if piece["steps"]:
        agent_steps = int(piece["steps"] * agent_steps_of_update(settings))
        pace = agent_steps / piece["seconds"]
        print(f"{run.folder.name}: {agent_steps:,} agent steps, {pace:,.0f} a second")
    return is_done


def agent_steps_of_update(settings: ReinforcementSettings) -> float:
    """Agent steps per update; every observation is used in `epochs` updates."""
    return settings.batch_size / settings.epochs


def missing_games(name: str, seed: int, options: argparse.Namespace) -> list[str]:
    """The missing files of final games of a network."""
    wanted = [SPECTRUM, *[SLICED] * (options.control and name == "i-1.0")]
    folder = folder_of(name, seed, options)
    return [file for file in wanted if not (folder / file).exists()]


def evaluate_network(name: str, seed: int, options: argparse.Namespace) -> None:
    """Play the missing final games."""
    missing = missing_games(name, seed, options)
    if not missing:
        return
    trained = open_trained(folder_of(name, seed, options), options.device)
    if SPECTRUM in missing:
        widths = trained.widths if trained.settings.method == "i" else list(WIDTHS)
        run_spectrum(trained, widths, measure_latency=False)
    if SLICED in missing:
        found = spectrum(trained.model, trained.evaluate, WIDTHS, name="sliced", kind="control")
        write_json(trained.run.folder / SLICED, found.to_json())


def work_on(name: str, seed: int, options: argparse.Namespace, deadline: float | None) -> bool:
    """Continue a network; returns whether it is complete."""
    if not train_network(name, seed, options, deadline):
        return False
    if options.only_training:
        return True
    if deadline is None or time.time() < deadline:
        evaluate_network(name, seed, options)
    return not missing_games(name, seed, options)


# ---- the table -----------------------------------------------------------------------------------


def collect(options: argparse.Namespace) -> dict[tuple[str, int], Spectrum]:
    """The spectra of all finished networks."""
    found = {}
    for name in NETWORKS:
        for seed in options.seeds:
            folder = folder_of(name, seed, options)
            if (folder / SPECTRUM).exists():
                found[name, seed] = saved_spectrum(Run.open(folder))
            if (folder / SLICED).exists():
                found["sliced", seed] = Spectrum.from_json(read_json(folder / SLICED))
    return found


def rows_of(spectra: dict[tuple[str, int], Spectrum]) -> list[Row]:
    rows = [
        row_of(name, seed, point)
        for (name, seed), found in spectra.items()
        for point in found.points
    ]
    order = list(LABELS.values())
    return sorted(rows, key=lambda row: (order.index(row.network), row.seed, row.width))


def row_of(name: str, seed: int, point: SpectrumPoint) -> Row:
    assert point.width is not None
    names = ("score", "score_standard_error", "greedy_score", "greedy_score_standard_error")
    values = (point.metrics[metric] for metric in names)
    network = LABELS[name.partition("-")[0]]
    return Row(network, seed, point.width, point.macs, point.parameters, *values)


def findings(rows: Sequence[Row]) -> list[str]:
    """US-Net minus I-Net at every width, with the standard error of the difference."""
    lines = []
    for width in WIDTHS:
        means = {}
        for network in ("US-Net", "I-Net"):
            same = [row for row in rows if row.network == network and row.width == width]
            if same:
                mean = statistics.mean(row.score for row in same)
                error = math.hypot(*(row.score_standard_error for row in same)) / len(same)
                means[network] = mean, error
        if len(means) == 2:
            (us, us_error), (i, i_error) = means["US-Net"], means["I-Net"]
            lines.append(
                f"width {width}: US-Net {us:.1f}, I-Net {i:.1f}, difference {us - i:+.1f} ± "
                f"{math.hypot(us_error, i_error):.1f} (standard error over games)"
            )
    return lines


def facts_of(options: argparse.Namespace) -> dict[str, Any]:
    folders = [
        folder
        for name in NETWORKS
        for seed in options.seeds
        if ((folder := folder_of(name, seed, options)) / "config.json").exists()
    ]
    settings = settings_of("us", options.seeds[0], options)
    return {
        "command": shlex.join(["python", "-m", "benchmarks.reinforcement", *sys.argv[1:]]),
        **provenance(local_device(options.device)),
        "cores": os.cpu_count(),
        "environment": settings.environment,
        "agent_steps": settings.steps,
        "games": settings.evaluation_games,
        "seeds": list(options.seeds),
        "agent_steps_per_second": {
            folder.name: round(
                steps_per_second(read_pieces(folder)) * agent_steps_of_update(settings), 1
            )
            for folder in folders
        },
        "configuration": to_json(settings),
    }


def to_markdown(rows: Sequence[Row], facts: dict[str, Any], lines: Sequence[str]) -> str:
    headings = ["network", "seed", "width", "multiply-adds", "score", "score, greedy"]
    table = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for row in rows:
        sampled = f"{row.score:.1f} ± {row.score_standard_error:.1f}"
        greedy = f"{row.greedy_score:.1f} ± {row.greedy_score_standard_error:.1f}"
        costs = format_count(row.multiply_adds)
        table.append([row.network, str(row.seed), str(row.width), costs, sampled, greedy])
    text = ["| " + " | ".join(cells) + " |" for cells in table]
    pages = [f"{name}: {value}" for name, value in facts.items() if name != "configuration"]
    return "\n".join([*pages, "", *lines, "", *text, ""])


def to_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Row.__annotations__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(vars(row) for row in rows)
    return text.getvalue()


def summarise(options: argparse.Namespace) -> None:
    spectra = collect(options)
    rows = rows_of(spectra)
    facts, lines = facts_of(options), findings(rows)
    stem = options.out / "reinforcement"
    text = to_markdown(rows, facts, lines)
    write_atomically(stem.with_suffix(".md"), text.encode())
    write_atomically(stem.with_suffix(".csv"), to_csv(rows).encode())
    data = {**facts, "findings": lines, "rows": [vars(row) for row in rows]}
    write_json(stem.with_suffix(".json"), data)
    folders = {
        (name, seed): folder_of(name, seed, options) for name in NETWORKS for seed in options.seeds
    }
    draw(folders, spectra, f"{facts['environment']}, {facts['agent_steps']:,} agent steps", stem)
    missing = [folder.name for key, folder in folders.items() if key not in spectra]
    if missing:
        print(f"not done yet: {', '.join(missing)}; the same command goes on with them")
    print(text)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path, help="folder for runs and results")
    parser.add_argument("--recipe", default="rl_breakout", help="rl_breakout or rl")
    parser.add_argument("--steps", type=int, help="agent steps of each network")
    parser.add_argument(
        "--minutes", type=float, help="stop after so many minutes; the same command continues"
    )
    parser.add_argument("--only", choices=NETWORKS, action="append", help="may be repeated")
    parser.add_argument("--parallel", action="store_true", help="one process per network")
    parser.add_argument(
        "--control", action="store_true", help="also cut the I-Net of width 1.0 to the other widths"
    )
    parser.add_argument("--points", type=int, default=25, help="points of the learning curves")
    parser.add_argument("--seeds", default="0", help="such as 0,1,2")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field of the configuration, such as environments=32; may be repeated",
    )
    parser.add_argument("--only-training", action="store_true", help="play no final games yet")
    parser.add_argument("--no-table", action="store_true", help="train and evaluate only")
    options = parser.parse_args(arguments)
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    for change in options.set:
        if "=" not in change:
            parser.error(f"--set {change}: expected FIELD=VALUE, such as environments=32")
    options.set = [tuple(change.split("=", 1)) for change in options.set]
    return options


def main(arguments: Sequence[str]) -> None:
    started = time.time()
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.only or list(NETWORKS)
    if options.parallel and len(names) > 1:
        work_in_parallel("benchmarks.reinforcement", names, arguments)
    else:
        deadline = None if options.minutes is None else started + 60 * options.minutes
        for seed in options.seeds:
            for name in names:
                if not work_on(name, seed, options, deadline):
                    print(f"{name}: stopped before its end; the same command goes on with it")
                    break
    if not options.no_table:
        summarise(options)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except AnywidthError as error:
        raise SystemExit(f"benchmarks.reinforcement: {error}") from None
