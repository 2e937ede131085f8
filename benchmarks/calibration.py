"""Time the calibration of many widths against plain forward passes over the same samples.

    python -m benchmarks.calibration --out benchmarks/results/calibration.json

Run it from the repository's root. The plain passes use the same network, widths and batches without
gradients: once in evaluation mode, and once with batch norm in training mode, which any computation
of statistics needs. Rounds of all three alternate, and the fastest of each counts, because other
work on the machine can only add time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import anywidth as aw
from benchmarks.records import circumstances, wait, write_record

LIMIT = 1.2


def build(name: str, pixels: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(aw.models, name)(num_classes=10, in_channels=1, total_stride=16)
    aw.slimmable(model, example_input=torch.randn(2, 1, pixels, pixels))
    return model.to(device, memory_format=torch.channels_last)


def forward_passes(
    model: nn.Module, batches: Sequence[Tensor], widths: Sequence[float], train_norms: bool
) -> None:
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train(train_norms)
    with torch.no_grad():
        for batch in batches:
            for width in widths:
                aw.set_width(model, width)
                model(batch)
    aw.set_width(model, 1.0)
    model.eval()


def seconds(work: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def measure(options: argparse.Namespace) -> dict[str, object]:
    device = torch.device(options.device)
    model = build(options.model, options.pixels, device)
    widths = [round(0.25 + 0.75 * i / (options.widths - 1), 6) for i in range(options.widths)]
    images = torch.randn(options.samples, 1, options.pixels, options.pixels, device=device)
    batches = images.contiguous(memory_format=torch.channels_last).split(options.batch_size)
    works: dict[str, Callable[[], None]] = {
        "calibration": lambda: aw.calibrate(model, batches, widths),
        "evaluation": lambda: forward_passes(model, batches, widths, train_norms=False),
        "training_norms": lambda: forward_passes(model, batches, widths, train_norms=True),
    }
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, work in works.items():
            times[name].append(seconds(work, device))
    best = {name: min(found) for name, found in times.items()}
    return {
        "model": options.model,
        "widths": len(widths),
        "samples": options.samples,
        "batch_size": options.batch_size,
        "pixels": options.pixels,
        **circumstances(device),
        "seconds": {name: round(value, 4) for name, value in best.items()},
        "ratio_to_evaluation": round(best["calibration"] / best["evaluation"], 3),
        "ratio_to_training_norms": round(best["calibration"] / best["training_norms"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Calibration against plain forward passes.")
    parser.add_argument("--model", default="mobilenet_v1", choices=["mobilenet_v1", "mobilenet_v2"])
    parser.add_argument("--widths", type=int, default=31)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--pixels", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(result, indent=2))
    print(
        f"calibrating {result['widths']} widths costs {result['ratio_to_evaluation']} times as "
        f"many forward passes (limit {LIMIT}), {result['ratio_to_training_norms']} times those "
        "with batch norm in training mode"
    )
    write_record(options.out, result)


if __name__ == "__main__":
    main()
