"""The time of a training pass in bfloat16 on this CPU, relative to float32.

    python3 -m benchmarks.cpu_precision [--out benchmarks/results/cpu_precision.json]

Forward and backward at full width, channels-last, one thread. Passes in both precisions alternate,
and the result is the median ratio of neighbouring passes, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.app.studies.provenance import provenance
from benchmarks.step import build

# (network, pixels, batch)
CASES = [
    ("mobilenet_v1", 32, 64),
    ("mobilenet_v1+cifar", 32, 64),
    ("mobilenet_v1", 224, 8),
    ("mobilenet_v2", 32, 64),
    ("mobilenet_v2", 224, 8),
    ("torchvision:resnet50", 224, 8),
]


def training_seconds(model: nn.Module, images: Tensor, labels: Tensor, is_half: bool) -> float:
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        loss = nn.functional.cross_entropy(model(images), labels)
    torch.autograd.grad(loss, list(model.parameters()))
    return time.perf_counter() - start


def compare(name: str, pixels: int, batch: int, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build(name, pixels).to(memory_format=torch.channels_last).train()
    images = torch.randn(batch, 3, pixels, pixels).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,))
    pairs = []
    for repeat in range(repeats + 1):
        order = (False, True) if repeat % 2 else (True, False)
        times = {half: training_seconds(model, images, labels, half) for half in order}
        pairs.append((times[True], times[False]))
    pairs = pairs[1:]
    return {
        "network": name,
        "pixels": pixels,
        "batch": batch,
        "bfloat16_ms": 1e3 * statistics.median(half for half, _ in pairs),
        "float32_ms": 1e3 * statistics.median(whole for _, whole in pairs),
        "share": statistics.median(half / whole for half, whole in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=9, help="pairs of passes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "command": "python3 -m benchmarks.cpu_precision",
        **provenance(torch.device("cpu")),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "cases": [],
    }
    print(f"{'network':22}{'px':>5}{'batch':>7}{'bf16 ms':>10}{'fp32 ms':>10}{'share':>8}")
    for case in CASES:
        row = compare(*case, arguments.repeats)
        record["cases"].append(row)
        print(
            f"{row['network']:22}{row['pixels']:5}{row['batch']:7}{row['bfloat16_ms']:10.0f}"
            f"{row['float32_ms']:10.0f}{row['share']:8.2f}",
            flush=True,
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
