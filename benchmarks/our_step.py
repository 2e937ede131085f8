"""Time and memory of our step over four widths, to compare two commits on one GPU.

    python3 -m benchmarks.our_step

It takes a minute, because unlike `benchmarks.step` it does not time alternatives. Run it in a
checkout of each commit, one after the other on the same machine. With `--products` every network is
also timed with kernels for pointwise convolutions, which are switched off until then. `--profile`
adds the kernels that take most of the time of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import anywidth as aw
from anywidth.app.model_spec import load_model
from anywidth.training.gpu import fast_convolutions
from benchmarks.records import circumstances
from benchmarks.step import sandwich_step

STRIDES = (1, 2, 1, 2, 2)
# Network, pixels, batch, options: as trained on CIFAR-10, and at ImageNet's size.
SETTINGS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "MobileNet v1, 32 px, total stride 8": ("mobilenet_v1", 32, 512, {"total_stride": 8}),
    "MobileNet v2, 32 px, strides 1,2,1,2,2": ("mobilenet_v2", 32, 512, {"strides": STRIDES}),
    "MobileNet v1, 224 px": ("mobilenet_v1", 224, 256, {}),
    "MobileNet v2, 224 px": ("mobilenet_v2", 224, 256, {}),
    "ResNet-50, 224 px": ("torchvision:resnet50", 224, 256, {}),
}
LOWEST = {"mobilenet_v1": 0.25, "mobilenet_v2": 0.35, "torchvision:resnet50": 0.25}


def profile(step: Callable[[], object], steps: int = 5, most: int = 30) -> list[dict[str, Any]]:
    """The kernels that take most of the time of a step, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = [
        {
            "kernel": event.key[:120],
            "ms": round(event.self_device_time_total / 1e3 / steps, 3),
            "launches": round(event.count / steps),
        }
        for event in recorded.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["ms"])[:most]


def measure(
    name: str, pixels: int, batch: int, options: dict[str, Any], is_profiled: bool = False
) -> dict[str, Any]:
    """The median of five times ten steps, the peak memory, and the kernels if asked for."""
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    model = load_model(name, num_classes=10, **options)
    aw.slimmable(model, example_input=torch.randn(2, 3, pixels, pixels), verified=False)
    step = sandwich_step(model)
    step.sampling = aw.Sampling("fixed", widths=(1.0, LOWEST[name], 0.475, 0.725))
    x = torch.randn(batch, 3, pixels, pixels, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,), device="cuda")
    for _ in range(6):
        step(x, y)
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(10):
            step(x, y)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 100)
    gigabytes = torch.cuda.max_memory_allocated() / 2**30
    found = {"step_ms": round(statistics.median(times), 2), "memory_gib": round(gigabytes, 2)}
    return found | {"kernels": profile(lambda: step(x, y))} if is_profiled else found


def main() -> int:
    """Measure all settings and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--products", action="store_true", help="also with kernels for pointwise convolutions"
    )
    parser.add_argument("--profile", action="store_true", help="also the slowest kernels")
    parser.add_argument("--only", default="", help="part of the names of the networks to measure")
    given = parser.parse_args()
    both = (False, True) if given.products else (False,)
    if not torch.cuda.is_available():
        print("a CUDA GPU is needed", file=sys.stderr)
        return 1
    found = {}
    for text, setting in SETTINGS.items():
        if given.only not in text:
            continue
        for fast_convolutions.USES_PRODUCTS in both:
            name = f"{text}, products" if fast_convolutions.USES_PRODUCTS else text
            found[name] = measure(*setting, given.profile)
    print(json.dumps({**circumstances("cuda"), "steps": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
