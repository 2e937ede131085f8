"""Compare the default recipe with its baselines on the bundled images, with several seeds.

    python3 -m benchmarks.demo --seeds 3 --out benchmarks/results/demo.json

It trains a US-Net and four I-Nets with the same recipe and epochs, and slices and calibrates the
I-Net at 1.0 as a control. Runs are kept under `--runs`; finished ones are not trained again. With
`--set validation=split`, errors are those on a tenth of the training images, to tune by.

    python3 -m benchmarks.demo --draw demo.png

draws the recorded result of seed 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import anywidth as aw
from anywidth.app.runs.settings import override
from anywidth.app.showing.plots import plot_spectra
from anywidth.app.studies.pieces import open_run, train_piece
from anywidth.app.tasks.classification.networks import build_model
from anywidth.app.tasks.classification.recipes import fashion_mnist_demo
from anywidth.app.tasks.classification.task import (
    TrainedClassifier,
    open_trained,
    train_run,
)
from anywidth.app.tasks.results import run_spectrum
from anywidth.distributed import local_device
from anywidth.measuring.spectra import Spectrum, SpectrumPoint
from benchmarks.records import circumstances, write_record

RECORD = Path(__file__).parent / "results" / "demo.json"
WIDTHS = [0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1.0]
I_NETS = (0.1, 0.25, 0.5, 1.0)
NETWORKS: dict[str, dict[str, Any]] = {
    "US-Net": {},
    **{f"I-Net {width}": {"method": "i", "width": width} for width in I_NETS},
}


def errors(job: tuple[str, int, str, dict[str, str], Path]) -> tuple[str, int, dict[str, float]]:
    """Top-1 errors by width of one network and seed."""
    name, seed, device, changes, runs = job
    torch.set_num_threads(1)
    settings = dataclasses.replace(
        override(fashion_mnist_demo(), changes), seed=seed, device=device, **NETWORKS[name]
    )
    folder = runs / f"{name.lower().replace(',', '').replace(' ', '-')}-{seed}"
    run = open_run(folder, settings, {"device"}, option="--runs")
    train_piece(run, settings, train_run)
    trained = open_trained(folder, device, settings=settings)
    # The I-Net at full width is also run narrower: the control.
    widths = WIDTHS if name in ("US-Net", "I-Net 1.0") else trained.widths
    if seed == 0 and name == "US-Net":
        widths = trained.widths
    trained.calibrate(widths)
    spectrum = run_spectrum(trained, widths, measure_latency=False)
    found = {str(point.width): point.metrics["top1_error"] for point in spectrum.points}
    return name, seed, found


def draw(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw seed 0 of the US-Net, and of the I-Nets at their widths."""
    model = build_model(fashion_mnist_demo(), 10, (1, 28, 28))

    def spectrum(label: str, name: str, kind: str, widths: Sequence[str] = ()) -> Spectrum:
        points = [
            SpectrumPoint(
                float(width),
                {},
                aw.macs(model, float(width)),
                aw.parameter_count(model, float(width)),
                {"top1_error": found[name][width][0]},
            )
            for width in widths or sorted(found[name], key=float)
        ]
        return Spectrum(label, tuple(points), kind, TrainedClassifier.metrics)

    spectra = [
        spectrum("one network for all widths (US-Net)", "US-Net", "us"),
        *(
            spectrum("networks trained alone (I-Net)", f"I-Net {width}", "i", [str(width)])
            for width in I_NETS
        ),
    ]
    plot_spectra(spectra, path)


def print_table(found: dict[str, dict[str, list[float]]]) -> None:
    print("| network | " + " | ".join(map(str, WIDTHS)) + " |")
    print("|---" * (len(WIDTHS) + 1) + "|")
    for name, by_width in found.items():
        cells = []
        for width in map(str, WIDTHS):
            values = by_width.get(width, [])
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.2f}{spread}" if values else "")
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", type=Path, help="train nothing; draw the recorded result")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"))
    parser.add_argument("--set", nargs="*", default=[], help="field=value of the recipe")
    parser.add_argument("--only", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.draw:
        draw(json.loads(RECORD.read_text())["top1_error"], arguments.draw)
        return
    torch.set_num_threads(1)  # as the processes have, for the record
    for item in arguments.set:
        if "=" not in item:
            parser.error(f"--set {item}: expected field=value, such as epochs=2")
    changes = dict(item.split("=", 1) for item in arguments.set)
    jobs = [
        (name, seed, arguments.device, changes, arguments.runs)
        for seed in range(arguments.seeds)
        for name in arguments.only
    ]
    found: dict[str, dict[str, list[float]]] = {}
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for name, seed, by_width in pool.map(errors, jobs):
            print(f"{name}, seed {seed}: {by_width}", flush=True)
            for width, error in by_width.items():
                found.setdefault(name, {}).setdefault(width, []).append(error)
    print_table(found)
    about = circumstances(local_device(arguments.device))
    write_record(arguments.out, {**about, "changes": changes, "top1_error": found})


if __name__ == "__main__":
    try:
        main()
    except aw.AnywidthError as error:
        raise SystemExit(f"benchmarks.demo: {error}") from None
