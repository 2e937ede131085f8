"""The time of a sliced forward pass relative to the extracted network, and of setting a width.

    python3 -m benchmarks.slicing [--out benchmarks/results/slicing.json]

US-MobileNet v1 at width 0.5, 224 px, evaluation mode without gradients, on the CPU. Sliced and
extracted passes alternate, and the result is the median ratio of neighbouring passes, so that a
busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anywidth as aw
from benchmarks.records import (
    circumstances,
    in_turns,
    median_ratio,
    milliseconds,
    random_network,
    write_record,
)

WIDTH = 0.5


def compare(model: nn.Module, batch_size: int, repeats: int) -> dict[str, float]:
    images = torch.randn(batch_size, 3, 224, 224)
    small = aw.extract(model, WIDTH).eval()
    runs = {"sliced": partial(model, images), "extracted": partial(small, images)}
    with torch.no_grad(), aw.at_width(model, WIDTH):
        times = in_turns(runs, repeats + 2)
    sliced, extracted = times["sliced"][2:], times["extracted"][2:]
    return {
        "sliced_ms": statistics.median(sliced),
        "extracted_ms": statistics.median(extracted),
        "ratio": median_ratio(sliced, extracted),
    }


def switching(model: nn.Module) -> dict[str, float]:
    """Time to set and count known widths, and nonuniform ones that are new each time."""
    plan = aw.plan_of(model)
    seen = plan.lattice(60)
    names = [group.name for group in plan.elastic()]
    fresh = [plan.resolve({names[i % 14]: 0.3 + 0.005 * i}) for i in range(100)]
    for config in seen:
        aw.set_width(model, config)
    return {
        "set_width_ms": _median(lambda config: aw.set_width(model, config), seen),
        "set_new_width_ms": _median(lambda config: aw.set_width(model, config), fresh),
        "macs_ms": _median(lambda config: aw.macs(model, config), fresh),
    }


def _median(use: Callable[[aw.ChannelConfig], Any], configs: list[aw.ChannelConfig]) -> float:
    return statistics.median(milliseconds(lambda c=config: use(c)) for config in configs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=100, help="pairs at batch 1")
    arguments = parser.parse_args()
    model = random_network(aw.models.mobilenet_v1, [WIDTH])
    figures: dict[str, Any] = {**circumstances("cpu"), "width": WIDTH, **switching(model)}
    aw.set_width(model, 1.0)
    for batch_size in (1, 32):
        repeats = arguments.repeats if batch_size == 1 else max(5, arguments.repeats // 8)
        figures[f"batch_{batch_size}"] = compare(model, batch_size, repeats)
    for name, value in figures.items():
        print(f"{name:18} {json.dumps(value)}")
    write_record(arguments.out, figures)


if __name__ == "__main__":
    main()
