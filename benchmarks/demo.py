"""Compare the default recipe with its baselines on the bundled images, with several seeds.

    python3 -m benchmarks.demo --seeds 3 --out benchmarks/results/demo.json

It is a study that trains a US-Net and four I-Nets with the same recipe and epochs, and slices and
calibrates the I-Net at 1.0 as a control. Runs are kept under `--runs`: the same command continues.
With `--set validation=split`, errors are those on a tenth of the training images, to tune by.

    python3 -m benchmarks.demo --draw demo.png

draws the recorded result of seed 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

import anywidth as aw
from anywidth.app.runs.settings import override
from anywidth.app.showing.plots import plot_spectra
from anywidth.app.studies.processes import work_through
from anywidth.app.studies.study_parts import Measurement, Network, Setting, Study, training
from anywidth.app.studies.tables import collect
from anywidth.app.studies.trainings import jobs_of
from anywidth.app.tasks.classification.networks import build_model
from anywidth.app.tasks.classification.recipes import fashion_mnist_demo
from anywidth.app.tasks.classification.task import TrainedClassifier
from anywidth.distributed import local_device
from anywidth.measuring.spectra import Spectrum, SpectrumPoint
from benchmarks.records import circumstances, write_record

RECORD = Path(__file__).parent / "results" / "demo.json"
WIDTHS = (0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1.0)
I_NETS = (0.1, 0.25, 0.5, 1.0)
NETWORK = Network("mobilenet_v1", "half of MobileNet v1", WIDTHS)


def i_net(width: float) -> Setting:
    """A network trained alone; the one at full width is also run narrower, as the control."""
    measurement = Measurement("table", widths="table") if width == 1 else OWN_WIDTH
    alone = training(NETWORK, method="i", width=width)
    return Setting(f"I-Net {width}", NETWORK, (alone,), measurement, kind="i")


OWN_WIDTH = Measurement("own-width", widths="trained")
US_NET = Setting("US-Net", NETWORK, (training(NETWORK),), Measurement("spectrum"))
STUDY = Study("demo", None, "", (US_NET, *map(i_net, I_NETS)), lambda results: [])

Errors = dict[str, dict[str, list[float]]]
"""Network → width → top-1 error of each seed."""


def measured(study: Study, seeds: int, runs: Path) -> Errors:
    results = collect(study, seeds, runs)
    return {
        label: {
            str(width): [one.at(width).metrics["top1_error"] for one in by_seed.values()]
            for width in results.widths((network, label))
        }
        for (network, label), by_seed in results.spectra.items()
    }


def draw(found: Errors, path: Path) -> None:
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


def print_table(found: Errors) -> None:
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
    labels = [one.label for one in STUDY.settings]
    parser.add_argument("--draw", type=Path, help="train nothing; draw the recorded result")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/demo-benchmark"))
    parser.add_argument("--set", nargs="*", default=[], help="field=value of the recipe")
    parser.add_argument("--only", nargs="*", default=labels, choices=labels)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.draw:
        draw(json.loads(RECORD.read_text())["top1_error"], arguments.draw)
        return
    # One thread each, here and in new processes.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    for item in arguments.set:
        if "=" not in item:
            parser.error(f"--set {item}: expected field=value, such as epochs=2")
    changes = dict(item.split("=", 1) for item in arguments.set)
    recipe = override(fashion_mnist_demo(), {**changes, "device": arguments.device})
    chosen = tuple(one for one in STUDY.settings if one.label in arguments.only)
    study = dataclasses.replace(STUDY, settings=chosen)
    jobs = jobs_of([study], {STUDY.name: arguments.seeds}, {NETWORK.name: recipe}, arguments.runs)
    if not work_through(jobs, arguments.processes):
        raise SystemExit("Stopped; the same command continues.")
    found = measured(study, arguments.seeds, arguments.runs)
    print_table(found)
    about = circumstances(local_device(arguments.device))
    write_record(arguments.out, {**about, "changes": changes, "top1_error": found})


if __name__ == "__main__":
    try:
        main()
    except aw.AnywidthError as error:
        raise SystemExit(f"benchmarks.demo: {error}") from None
