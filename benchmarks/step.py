"""How long one training step over four widths takes on a GPU, against what else one could do.

    python3 -m benchmarks.step --out benchmarks/results

Every column is measured in the same run: ours; (a) the naive sliced step (attributes set by
`model.apply`, tf32, a synchronisation a width); (b) the four static networks, eager bfloat16
channels-last, summed; (c) the same under torch.compile; (d) one static full-width eager step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anywidth as aw
from anywidth.extraction import extract_quietly
from anywidth.model_spec import load_model
from anywidth.state import state_of
from benchmarks.naive import make_naive, naive_step

WIDTHS = (1.0, 0.25, 0.475, 0.725)
# "+cifar" is the network with its first strides dropped, as it is trained on 32 px images.
SETTINGS = {
    ("mobilenet_v1", 32): 512,
    ("mobilenet_v1", 224): 256,
    ("mobilenet_v1+cifar", 32): 512,
    ("mobilenet_v2", 32): 512,
    ("mobilenet_v2", 224): 256,
    ("torchvision:resnet50", 32): 512,
    ("torchvision:resnet50", 224): 256,
}


def plain(name: str) -> nn.Module:
    """The network as it comes."""
    name, _, variant = name.partition("+")
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_classes": 1000}
    if variant == "cifar":
        options["total_stride"] = 8
    return load_model(name, **options)


def build(name: str, pixels: int) -> nn.Module:
    """The network made slimmable."""
    model = plain(name)
    aw.slimmable(model, example_input=torch.randn(2, 3, pixels, pixels), verified=False)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=True)


def median_ms(run: Callable[[], Any], repeats: int = 30, warmup: int = 8) -> float:
    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def static_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    optimizer = optimizer_of(model)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return run


def compiled_step(
    model: nn.Module, width: float, images: Tensor, labels: Tensor
) -> Callable[[], None]:
    torch._dynamo.reset()
    small = extract_quietly(model, width).cuda().to(memory_format=torch.channels_last)
    return static_step(torch.compile(small.train()), images, labels)


def compile_ahead(settings: Sequence[tuple[str, int]], processes: int) -> None:
    """Compiles all static networks in parallel, for the cache on disk: it takes long one by one."""

    def work(setting: tuple[str, int, float]) -> None:
        text = "/".join(map(str, setting))
        subprocess.run([sys.executable, "-m", "benchmarks.step", "--compile", text], check=True)

    jobs = [(name, pixels, width) for name, pixels in settings for width in WIDTHS]
    # Large ones first, so that the last to finish are short.
    jobs.sort(key=lambda job: ("resnet" not in job[0], -job[1]))
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(work, jobs))


def compile_one(text: str) -> None:
    *name, pixels, width = text.split("/")
    setting = ("/".join(name), int(pixels))
    images = torch.randn(SETTINGS[setting], 3, setting[1], setting[1], device="cuda")
    labels = torch.randint(0, 1000, (len(images),), device="cuda")
    images = images.contiguous(memory_format=torch.channels_last)
    compiled_step(build(*setting), float(width), images, labels)()


def floor_bytes(model: nn.Module, batch: int, pixels: int) -> int:
    """Bytes that must move if each layer read its input and wrote its output once, in bfloat16.

    Forward: input and output. Backward: the output's gradient, the input, the input's gradient.
    """
    total = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        total += 2 * (3 * inputs[0].numel() + 2 * output.numel())

    state = state_of(model)
    for width in WIDTHS:
        small = extract_quietly(model, state.resolve(width)).to("meta")
        for module in small.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_forward_hook(count)
        small(torch.empty(batch, 3, pixels, pixels, device="meta"))
    return total


def measure(name: str, pixels: int, batch: int, compiled: bool, bandwidth: float) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    images = torch.randn(batch, 3, pixels, pixels, device="cuda")
    labels = torch.randint(0, 1000, (batch,), device="cuda")
    last = images.contiguous(memory_format=torch.channels_last)
    row: dict[str, Any] = {"model": name, "pixels": pixels, "batch": batch}

    model = build(name, pixels)
    floor = floor_bytes(model, batch, pixels) / bandwidth * 1e3
    parts = []
    for width in WIDTHS:
        small = extract_quietly(model, width).cuda().to(memory_format=torch.channels_last).train()
        torch.cuda.reset_peak_memory_stats()
        parts.append(median_ms(static_step(small, last, labels)))
        if width == 1.0:
            row["full eager (d) ms"] = parts[0]
            row["full eager MiB"] = torch.cuda.max_memory_allocated() / 2**20
        del small
        torch.cuda.empty_cache()
    row["static summed (b) ms"] = sum(parts)
    if compiled:
        parts = [median_ms(compiled_step(model, width, last, labels)) for width in WIDTHS]
        row["compiled summed (c) ms"] = sum(parts)
        torch._dynamo.reset()
        torch.cuda.empty_cache()

    model = model.cuda().train()
    torch.cuda.reset_peak_memory_stats()
    step = aw.SandwichStep(
        model, optimizer_of(model), F.cross_entropy, autocast=torch.bfloat16, engine="graphs"
    )
    step.sampling = aw.Sampling("fixed", widths=WIDTHS)
    row["ours ms"] = median_ms(lambda: step(last, labels))
    row["ours MiB"] = torch.cuda.max_memory_allocated() / 2**20
    row["first sight ms"] = first_sight(step, last, labels) - row["ours ms"]
    row["floor ms"] = floor
    model.cpu()
    torch.cuda.empty_cache()
    naive = make_naive(plain(name), (WIDTHS[0], WIDTHS[1])).cuda().train()
    row["naive (a) ms"] = median_ms(naive_step(naive, WIDTHS, images, labels), 10, 3)
    return row


def first_sight(step: aw.SandwichStep, images: Tensor, labels: Tensor) -> float:
    """Median time of a step in which one of the four widths is new."""
    times = []
    for number in range(5):
        step.sampling = aw.Sampling("fixed", widths=(1.0, 0.25, 0.475, 0.3 + 0.06 * number))
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(images, labels)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def copy_bandwidth() -> float:
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source), repeats=10)
    return 2 * source.numel() * 4 / (ms / 1e3)


def summary(row: dict[str, Any]) -> str:
    """One line: how many times slower the others are, and what share of them ours is."""
    ours = row["ours ms"]
    parts = [f"{row['model']:22} {row['pixels']:3} px", f"ours {ours:7.2f} ms"]
    for label, key in (("naive", "naive (a) ms"), ("static", "static summed (b) ms"),
                       ("compiled", "compiled summed (c) ms")):  # fmt: skip
        if key in row:
            parts.append(f"{label} {row[key] / ours:5.2f}x")
    parts.append(f"of full eager {ours / row['full eager (d) ms']:5.2f}")
    parts.append(f"memory {row['ours MiB'] / row['full eager MiB']:5.2f}")
    parts.append(f"first sight {row['first sight ms']:6.1f} ms")
    parts.append(f"of the floor {row['floor ms'] / ours:5.2f}")
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for step.json and step.csv")
    parser.add_argument("--compiled", action="store_true", help="measure (c) too: slow")
    parser.add_argument("--only", help="such as mobilenet_v1/224,mobilenet_v1/32", default="")
    parser.add_argument("--processes", type=int, default=10, help="that compile ahead for (c)")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        compile_one(arguments.compile)
        return
    chosen = arguments.only.split(",") if arguments.only else []
    settings = [s for s in SETTINGS if not chosen or f"{s[0]}/{s[1]}" in chosen]
    compilable = [s for s in settings if "+" not in s[0]]
    if arguments.compiled:
        started = time.perf_counter()
        compile_ahead(compilable, arguments.processes)
        print(f"compiled ahead in {time.perf_counter() - started:.0f} s", flush=True)
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    for name, pixels in settings:
        compiled = arguments.compiled and (name, pixels) in compilable
        rows.append(measure(name, pixels, SETTINGS[name, pixels], compiled, bandwidth))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out:
            record(arguments.out, rows, bandwidth)
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {bandwidth / 1e12:.2f} TB/s"
    )
    for row in rows:
        print(summary(row))


def record(folder: Path, rows: list[dict[str, Any]], bandwidth: float) -> None:
    """Writes step.json; after every row, so that a run cut short loses nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    facts = {
        "command": f"python3 -m benchmarks.step {' '.join(sys.argv[1:])}",
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "widths": WIDTHS,
        "bandwidth_bytes_per_second": bandwidth,
        "rows": rows,
    }
    (folder / "step.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
