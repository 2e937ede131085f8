"""MobileNet v1 at 224 px for `benchmarks.governor`: one bundle, and static files per width."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anywidth_runtime
import numpy as np
from anywidth_runtime.contents import Width
from anywidth_runtime.governor_menu import Choice

import anywidth as aw
from anywidth.app.studies.paper import paper_errors
from anywidth.deploying.exporting import write_network
from anywidth.translating.called_network import described
from benchmarks.records import in_turns, milliseconds, open_session, random_network

ROOT = Path(__file__).parents[1]
PIXELS = 224
WIDTHS = [round(0.25 + 0.05 * step, 2) for step in range(16)]
STATIC_WIDTHS = (0.25, 0.5, 0.75, 1.0)

Run = Callable[[Sequence[Any], Width], Sequence[Any]]


@dataclass(frozen=True)
class Served:
    """Networks that a policy chooses from: how to run one, how long each takes, how good it is."""

    run: Run
    choices: list[Choice]


def published_accuracies() -> dict[Width, float]:
    """US-MobileNet v1 on ImageNet, top-1 accuracy in percent by width."""
    with (ROOT / "tests" / "reference" / "us_mobilenet_v1_imagenet.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {float(row["width"]): 100 - float(row["published_top1_error"]) for row in rows}


def published_alone() -> dict[Width, float]:
    """Four networks trained alone (I-Nets): the paper's table."""
    errors = paper_errors("main", "mobilenet_v1", "i-net")
    return {width: 100 - error for width, error in errors.items()}


def build(folder: Path) -> tuple[Path, dict[Width, Path]]:
    """Write the bundle and the static files, with random weights, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    bundle = folder / "mobilenet_v1.anywidth"
    files: dict[Width, Path] = {
        width: folder / f"mobilenet_v1-{width}.onnx" for width in STATIC_WIDTHS
    }
    if bundle.exists() and all(path.exists() for path in files.values()):
        return bundle, files
    model = random_network(aw.models.mobilenet_v1, WIDTHS)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
    deployment = described(model, **names)
    for width, path in files.items():
        write_network(aw.extract(model, width, fold=True), deployment, path)
    aw.export_bundle(model, bundle, WIDTHS, **names)
    return bundle, files


def of_bundle(bundle: Path, repeats: int) -> tuple[Served, anywidth_runtime.Network]:
    """All widths of one file, open."""
    network = anywidth_runtime.open(bundle)
    network.prepare()
    rows = network.measure(repeats=repeats, progress=False)
    known = published_accuracies()

    def run(values: Sequence[Any], width: Width) -> list[Any]:
        batch = values[0] if len(values) == 1 else np.concatenate(values)
        return list(network.run(batch, width=width))

    return Served(run, [Choice(r.width, r.latency_ms or 0, known[r.width]) for r in rows]), network


def of_static_files(files: Mapping[Width, Path], repeats: int, *, kept_open: bool) -> Served:
    """One file per width: all of them open, or one at a time, as if there were no more memory."""
    sessions = {width: open_session(path) for width, path in files.items()}
    image = np.random.default_rng(0).random((1, 3, PIXELS, PIXELS), np.float32)
    runs = {width: partial(one.run, None, {"images": image}) for width, one in sessions.items()}
    times = in_turns(runs, repeats)
    known = published_alone()
    choices = [Choice(width, float(np.median(times[width])), known[width]) for width in files]
    if not kept_open:
        sessions.clear()

    def run(values: Sequence[Any], width: Width) -> list[Any]:
        if width not in sessions:
            sessions.clear()
            sessions[width] = open_session(files[width])
        return list(sessions[width].run(None, {"images": values[0]})[0])

    return Served(run, choices)


def batch_times(
    network: anywidth_runtime.Network, batches: Sequence[int], repeats: int
) -> dict[tuple[Width, int], float]:
    """Median milliseconds by width and batch, for SlackFit."""
    found: dict[tuple[Width, int], float] = {}
    for batch in batches:
        images = np.random.default_rng(0).random((batch, 3, PIXELS, PIXELS), np.float32)
        for width in network.widths:
            run = partial(network.run, images, width=width)
            found[width, batch] = float(np.median([milliseconds(run) for _ in range(repeats)]))
    return found
