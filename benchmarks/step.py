"""The time of a training step over four widths on a GPU, compared with alternatives.

    python3 -m benchmarks.step --out benchmarks/results/step.json

All columns are measured in the same run: ours; (a) the naive sliced step (attributes set by
`model.apply`, tf32, one synchronisation per width); (b) the four static networks, eager bfloat16
channels-last, summed; (c) the same under torch.compile; (d) one static full-width eager step.
(a) is left out for ConvNeXt and ViT; their floors leave out attention and other products.

Each network has its own process. The processes prepare side by side, because cuDNN and
torch.compile need minutes of CPU time, and are then timed one after the other, alone on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anywidth as aw
from anywidth.app.model_spec import load_model
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.state import state_of
from benchmarks.naive import make_naive, naive_step
from benchmarks.records import circumstances, write_record

WIDTHS = (1.0, 0.25, 0.475, 0.725)
# "+cifar" is the network without its first strides, as it is trained on 32 px images.
SETTINGS = {
    ("mobilenet_v1", 32): 512,
    ("mobilenet_v1", 224): 256,
    ("mobilenet_v1+cifar", 32): 512,
    ("mobilenet_v2", 32): 512,
    ("mobilenet_v2", 224): 256,
    ("torchvision:resnet50", 32): 512,
    ("torchvision:resnet50", 224): 256,
    ("torchvision:convnext_tiny", 224): 256,
    ("torchvision:vit_b_16", 224): 256,
}


def plain(name: str) -> nn.Module:
    """The plain network."""
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


def static_step(
    model: nn.Module, images: Tensor, labels: Tensor, compiled: bool = False
) -> Callable[[], None]:
    """An ordinary training step of a network that has one width."""
    optimizer = optimizer_of(model)
    forward = compiled_alone(model) if compiled else model

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()

    return run


def floor_bytes(model: nn.Module, batch: int, pixels: int) -> int:
    """Bytes that must move if each layer reads its input and writes its output once, in bfloat16.

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


class Contest:
    """Everything that is timed on one network, prepared but not yet timed.

    Args:
        name, pixels: one of `SETTINGS`.
        compiled: whether to measure (c).
    """

    def __init__(self, name: str, pixels: int, compiled: bool) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self.name, self.pixels, self.batch = name, pixels, SETTINGS[name, pixels]
        self.images = torch.randn(self.batch, 3, pixels, pixels, device="cuda")
        self.last = self.images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 1000, (self.batch,), device="cuda")
        self.model = build(name, pixels)
        self.floor_bytes = floor_bytes(self.model, self.batch, pixels)
        self.static = [self._static(width) for width in WIDTHS]
        self.compiled = [self._static(width, True) for width in WIDTHS if compiled]
        for run in [*self.static, *self.compiled]:
            run()
        sandwich_step(build(name, pixels))(self.last, self.labels)
        torch.cuda.empty_cache()

    def measure(self, bandwidth: float) -> dict[str, Any]:
        """The row of the table; `bandwidth` is the GPU's, for the floor."""
        row: dict[str, Any] = {"model": self.name, "pixels": self.pixels, "batch": self.batch}
        parts = [median_ms(run) for run in self.static]
        row["full eager (d) ms"] = parts[0]
        row["static summed (b) ms"] = sum(parts)
        if self.compiled:
            row["compiled summed (c) ms"] = sum(median_ms(run) for run in self.compiled)
        self.static, self.compiled = [], []
        with self._peak_memory(row, "full eager MiB"):
            run = self._static(1.0)
            for _ in range(3):
                run()
            del run
        with self._peak_memory(row, "ours MiB"):
            step = sandwich_step(self.model)
            row["ours ms"] = median_ms(partial(step, self.last, self.labels))
        row["first sight ms"] = first_sight(step, self.last, self.labels) - row["ours ms"]
        row["floor ms"] = self.floor_bytes / bandwidth * 1e3
        has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in self.model.modules())
        del step
        if not has_batch_norm:
            return row  # the naive layers are those of convolutional networks
        self.model.cpu()
        torch.cuda.empty_cache()
        naive = make_naive(plain(self.name), (WIDTHS[0], WIDTHS[1])).cuda().train()
        run = naive_step(naive, WIDTHS, self.images, self.labels)
        row["naive (a) ms"] = median_ms(run, 10, 3)
        return row

    def _static(self, width: float, compiled: bool = False) -> Callable[[], None]:
        small = extract_quietly(self.model, width).cuda().train()
        small.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return static_step(small, self.last, self.labels, compiled)

    @contextlib.contextmanager
    def _peak_memory(self, row: dict[str, Any], name: str) -> Iterator[None]:
        """Record the peak memory of the block, including one batch of images."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        peak = torch.cuda.max_memory_allocated() - before + self.last.nbytes
        row[name] = peak / 2**20


def compiled_alone(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Compile for its own shapes, with its own code object: no guards of other networks."""

    def forward(images: Tensor) -> Tensor:
        output: Tensor = model(images)
        return output

    code = forward.__code__.replace(co_name=f"forward_{id(model)}")
    own = FunctionType(code, globals(), closure=forward.__closure__)
    return torch.compile(own, dynamic=False)


def sandwich_step(model: nn.Module) -> aw.SandwichStep:
    model.cuda().train()
    return aw.SandwichStep(
        model,
        optimizer_of(model),
        F.cross_entropy,
        widths=aw.Sampling("fixed", widths=WIDTHS),
        autocast=torch.bfloat16,
        engine="graphs",
    )


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
    """One line: the others relative to our step, and our step relative to (d)."""
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


# ---- one process per network ---------------------------------------------------------------------


class Contestant:
    """The process of one network: it prepares immediately, and is timed when told to."""

    def __init__(self, setting: tuple[str, int], compiled: bool) -> None:
        text = "/".join(map(str, setting))
        command = [sys.executable, "-m", "benchmarks.step", "--row", text]
        # "+cifar" is only for our own step; (c) is known from the plain network.
        command += ["--compiled"] * (compiled and "+" not in setting[0])
        self.name = text
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_until_ready(self) -> None:
        self._read()

    def measure(self, bandwidth: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{bandwidth}\n")
        self._process.stdin.flush()
        row: dict[str, Any] = json.loads(self._read())
        self._process.wait()
        return row

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: its process ended early; see the lines above")
        return line


def work_as_contestant(text: str, compiled: bool) -> None:
    """The other end: prints a line when it is ready, then, given the bandwidth, the row."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries does not go to the parent
    name, _, pixels = text.rpartition("/")
    contest = Contest(name, int(pixels), compiled)
    print("ready", file=answer, flush=True)
    print(json.dumps(contest.measure(float(sys.stdin.readline()))), file=answer, flush=True)


def run_contest(contestants: Sequence[Contestant], out: Path | None) -> None:
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    for contestant in contestants:
        rows.append(contestant.measure(bandwidth))
        print(json.dumps(rows[-1]), flush=True)
        # After every row, so that an interrupted run loses nothing.
        facts = {"widths": WIDTHS, "bandwidth_bytes_per_second": bandwidth, "rows": rows}
        write_record(out, {**circumstances("cuda"), **facts})
    name = torch.cuda.get_device_name()
    print(f"\n{name}, torch {torch.__version__}, {bandwidth / 1e12:.2f} TB/s")
    for row in rows:
        print(summary(row))


def prepare(settings: Sequence[tuple[str, int]], compiled: bool) -> list[Contestant]:
    """Start all processes and wait until they are ready."""
    started = time.perf_counter()
    contestants = [Contestant(setting, compiled) for setting in settings]
    try:
        for contestant in contestants:
            contestant.wait_until_ready()
            print(f"{contestant.name} ready, {time.perf_counter() - started:.0f} s", flush=True)
    except BaseException:
        for contestant in contestants:
            contestant.stop()
        raise
    return contestants


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--compiled", action="store_true", help="also measure (c), which is slow")
    parser.add_argument("--only", help="such as mobilenet_v1/224,mobilenet_v1/32", default="")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        work_as_contestant(arguments.row, arguments.compiled)
        return
    chosen = arguments.only.split(",") if arguments.only else []
    known = [f"{name}/{pixels}" for name, pixels in SETTINGS]
    if unknown := [one for one in chosen if one not in known]:
        parser.error(f"--only {','.join(unknown)}: expected some of {', '.join(known)}")
    if not torch.cuda.is_available():
        raise SystemExit("a CUDA GPU is needed")
    settings = [s for s in SETTINGS if not chosen or f"{s[0]}/{s[1]}" in chosen]
    run_contest(prepare(settings, arguments.compiled), arguments.out)


if __name__ == "__main__":
    main()
