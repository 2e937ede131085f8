"""Check the GPU kernels against float64 PyTorch, then time them against eager bfloat16 PyTorch.

    python -m benchmarks.kernels --out benchmarks/results/kernels.json

from the repository's root, on a machine with a CUDA GPU; about two minutes. Every kernel is checked
on fresh random inputs (values and gradients), then a new width must compile nothing, then the
layers of MobileNet v1 are timed as CUDA graphs. The exit code is 1 if anything failed. The table
printed last has, for all layers of the network together, the time of these kernels, of PyTorch, and
of the memory traffic that no implementation can avoid.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from anywidth import kernels
from anywidth.kernels import (
    batch_norm_backward,
    batch_norm_forward,
    batch_norm_small,
    depthwise_forward,
    depthwise_gradients,
)
from anywidth.kernels.depthwise_forward import depthwise_forward as depthwise
from anywidth.kernels.depthwise_gradients import depthwise_gradients as depthwise_backward

COPY_BANDWIDTH = 4.3e12  # bytes a second that a large copy moves on an H200
ROTATED_BYTES = 200e6  # inputs are rotated over this much memory, beyond the cache
# Largest error as a share of the largest value: rounding of the output, then float32 sums.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 5e-6}
SUM_TOLERANCE = 1e-5
FLIPPED = 5e-4  # of sums over values of which a few may be rounded either way
NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODULES = (
    batch_norm_backward,
    batch_norm_forward,
    batch_norm_small,
    depthwise_forward,
    depthwise_gradients,
)


# Correctness


@dataclass(frozen=True)
class Check:
    """One call to compare with float64: a depthwise convolution, a batch norm, or both at once."""

    operation: str
    dtype: str
    shape: tuple[int, int, int, int]
    kernel: int = 0
    stride: int = 0
    activation: str = ""


def checks() -> Iterator[list[Check]]:
    """Groups of checks; a group shares what has to be compiled."""
    aligned = [(3, 8, 7, 7), (2, 40, 14, 15), (4, 256, 7, 8), (8, 64, 57, 56)]
    other = [(1, 1, 1, 1), (5, 3, 5, 7), (2, 33, 8, 5), (3, 257, 7, 9)]
    # Batch norm over more than 4,096 pixels takes other kernels than over fewer.
    many_pixels = [(8, 40, 23, 24), (9, 3, 31, 33), (5, 257, 30, 31)]
    sizes = [(kernel, stride) for kernel in (3, 5) for stride in (1, 2)]
    for kernel, stride in sizes:
        for shapes in (aligned, other):
            yield [Check("depthwise", "bf16", shape, kernel, stride) for shape in shapes]
    for dtype, kernel, stride in [("fp32", 3, 1), ("fp32", 5, 2), ("fp16", 3, 2), ("fp16", 5, 1)]:
        yield [Check("depthwise", dtype, shape, kernel, stride) for shape in aligned]
    for kernel, stride in sizes:
        for activation in ("none", "silu"):  # without kinks, which rounding may take either way
            shapes = [(2, 40, 14, 15), (8, 64, 57, 56), *many_pixels]
            yield [Check("norm, depthwise", "bf16", s, kernel, stride, activation) for s in shapes]
    yield [Check("norm, depthwise", "fp32", s, 3, 1, "silu") for s in many_pixels]
    for activation in kernels.ACTIVATIONS:
        for dtype in NAMES:
            shapes = aligned + other[1:] + many_pixels if dtype == "bf16" else aligned
            yield [Check("batch norm", dtype, s, activation=activation) for s in shapes]


def channels_last(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal random numbers."""
    x = torch.randn(shape, dtype=dtype, device="cuda")
    return x.contiguous(memory_format=torch.channels_last)


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest error as a share of the largest value; infinite where there is a NaN."""
    largest = expected.abs().max().clamp(min=1e-3)
    share = float((actual.double() - expected).abs().max() / largest)
    return share if share == share else float("inf")


def both_versions(check: Check) -> tuple[list[Tensor], Any, Any, list[Tensor]]:
    """Random parameters, the float64 function, ours, and what each left in running statistics."""
    channels, half = check.shape[1], check.kernel // 2
    if check.operation == "depthwise":
        filters = torch.randn(channels + 5, 1, check.kernel, check.kernel, device="cuda")

        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            weight = weight[:channels]
            return functional.conv2d(x, weight, None, check.stride, half, groups=channels)

        def our_convolve(x: Tensor, weight: Tensor) -> Tensor:
            return kernels.depthwise_conv2d(x, weight, check.stride, half)

        return [filters], convolve, our_convolve, []
    if check.operation == "norm, depthwise":
        return deferred_versions(check)

    running = [
        torch.zeros(2, channels, dtype=d, device="cuda") for d in (torch.double, torch.float)
    ]

    def normalize(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean, variance = running[0]
        z = functional.batch_norm(
            x, mean, variance, weight[:channels], bias[:channels], True, 0.5, 1e-5
        )
        return z if check.activation == "none" else getattr(functional, check.activation)(z)

    def our_normalize(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean, variance = running[1]
        return kernels.batch_norm_act(x, weight, bias, mean, variance, 0.5, 1e-5, check.activation)

    parameters = [torch.randn(channels + 5, device="cuda") for _ in range(2)]
    return parameters, normalize, our_normalize, running


class RoundedGradient(torch.autograd.Function):
    """Passes on what it gets; the gradient is rounded to another type on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.to(ctx.dtype).to(gradient.dtype), None


def deferred_versions(check: Check) -> tuple[list[Tensor], Any, Any, list[Tensor]]:
    """A norm that the convolution after it does, and the statistics of that one's output."""
    channels, half = check.shape[1], check.kernel // 2
    size = channels + 5
    found = torch.zeros(2, 2, channels, dtype=torch.double, device="cuda")

    def activate(z: Tensor) -> Tensor:
        return z if check.activation == "none" else getattr(functional, check.activation)(z)

    def exact(x: Tensor, weight: Tensor, bias: Tensor, filters: Tensor) -> Tensor:
        z = functional.batch_norm(
            x, None, None, weight[:channels], bias[:channels], True, 0.5, 1e-5
        )
        # The gradient between the two is written to memory, so a perfect kernel rounds it too.
        z = RoundedGradient.apply(activate(z), NAMES[check.dtype])
        return functional.conv2d(z, filters[:channels], None, check.stride, half, groups=channels)

    def ours(x: Tensor, weight: Tensor, bias: Tensor, filters: Tensor) -> Tensor:
        norm = kernels.deferred_norm(x, weight, bias, None, None, 0.5, 1e-5, check.activation)
        y, partial = kernels.depthwise_conv2d_with_statistics(x, filters, check.stride, half, norm)
        if partial is not None:
            whole = y.detach().double()
            found[0] = torch.stack([whole.mean((0, 2, 3)), whole.var((0, 2, 3), correction=0)])
            ones, zeros = torch.ones(size, device="cuda"), torch.zeros(size, device="cuda")
            after = kernels.deferred_norm(
                y.detach(), ones, zeros, None, None, 0.5, 1e-5, "none", None, partial
            )
            found[1] = after.terms[:2]
        return y

    parameters = [torch.randn(size, device="cuda") for _ in range(2)]
    parameters.append(torch.randn(size, 1, check.kernel, check.kernel, device="cuda"))
    return parameters, exact, ours, list(found)


def near_kink(check: Check, inputs: list[Tensor]) -> Tensor:
    """Where rounding decides which side of a kink an activation is on: its slope is either's."""
    kinks = {"relu": (0.0,), "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0)}
    if check.activation not in kinks:
        return torch.zeros((), dtype=torch.bool, device="cuda")
    x, weight, bias = (t.detach() for t in inputs)
    channels = x.shape[1]
    z = functional.batch_norm(x, None, None, weight[:channels], bias[:channels], True, 0.5, 1e-5)
    return torch.stack([(z - kink).abs() < 1e-4 for kink in kinks[check.activation]]).any(0)


def compare(check: Check) -> dict[str, Any]:
    """Run one check; errors by what was compared."""
    x = channels_last(*check.shape, dtype=NAMES[check.dtype]).requires_grad_()
    parameters, exact, ours, running = both_versions(check)
    inputs = [x, *(p.requires_grad_() for p in parameters)]
    exact_inputs = [t.detach().double().requires_grad_() for t in inputs]
    expected = exact(*exact_inputs)
    dy = channels_last(*expected.shape, dtype=x.dtype)
    dy[near_kink(check, exact_inputs)] = 0
    gradients = torch.autograd.grad(expected, exact_inputs, dy.double())
    # Memory that nothing was written to holds NaN in this mode.
    torch.use_deterministic_algorithms(True)
    y = ours(*inputs)
    actual = torch.autograd.grad(y, inputs, dy)
    torch.use_deterministic_algorithms(False)

    tolerance = TOLERANCE[x.dtype]
    errors = {"y": (error(y.detach(), expected.detach()), tolerance)}
    limits = {"dx": tolerance}
    if check.operation == "norm, depthwise":
        # Where float32 is off by a hair, the gradient between the two is rounded the other way.
        limits = {"dx": 2 * tolerance, "dw": FLIPPED, "db": FLIPPED}
    for name, one, other in zip(["dx", "dw", "db", "df"], actual, gradients, strict=False):
        errors[name] = (error(one, other), limits.get(name, SUM_TOLERANCE))
    if running:
        errors["running"] = (error(running[1], running[0]), SUM_TOLERANCE)
    passed = all(value <= limit for value, limit in errors.values())
    return asdict(check) | {"passed": passed, "errors": {k: v for k, (v, _) in errors.items()}}


def compare_group(group: list[Check]) -> list[dict[str, Any]]:
    """Run a group of checks in a process of its own."""
    torch.manual_seed(time.time_ns() % 2**31)
    return [compare(check) for check in group]


def check_everything(processes: int) -> list[dict[str, Any]]:
    """Compile and check in parallel; what is compiled stays in Triton's cache on disk."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        results = [row for rows in pool.map(compare_group, checks()) for row in rows]
    worst: dict[str, float] = {}
    for row in results:
        for name, value in row["errors"].items():
            key = f"{row['operation']} {row['dtype']} {name}"
            worst[key] = max(worst.get(key, 0.0), value)
        if not row["passed"]:
            print("FAIL", row)
    print("\nlargest error against float64, as a share of the largest value")
    for key, value in sorted(worst.items()):
        print(f"  {key:28} {value:.1e}")
    passed = sum(row["passed"] for row in results)
    print(f"{'PASS' if passed == len(results) else 'FAIL'}: {passed} of {len(results)} checks")
    return results


# A new width compiles nothing


def variants() -> Counter[str]:
    """Compiled variants of every kernel in this process."""
    counts: Counter[str] = Counter()
    for module in MODULES:
        for name, value in vars(module).items():
            if name.endswith("_kernel") and hasattr(value, "device_caches"):
                counts[name] = sum(len(cache[0]) for cache in value.device_caches.values())
    return counts


def train_once(channels: int) -> None:
    """A depthwise layer and its batch norm, forward and backward, over few pixels and many."""
    for size in (14, 28):
        train_layer(channels_last(16, channels, size, size).requires_grad_())
    torch.cuda.synchronize()


def train_layer(x: Tensor) -> None:
    filters = torch.randn(512, 1, 3, 3, device="cuda", requires_grad=True)
    weight, bias = (torch.randn(512, device="cuda", requires_grad=True) for _ in range(2))
    y = kernels.depthwise_conv2d(x, filters, 1, 1)
    z = kernels.batch_norm_act(y, weight, bias, None, None, 0.1, 1e-5, "relu")
    z.backward(torch.ones_like(z))
    norm = kernels.deferred_norm(x, weight, bias, None, None, 0.1, 1e-5, "relu")
    y, partial = kernels.depthwise_conv2d_with_statistics(x, filters, 1, 1, norm)
    z = kernels.batch_norm_act(y, weight, bias, None, None, 0.1, 1e-5, "relu", None, partial)
    z.backward(torch.ones_like(z))


def check_new_widths() -> dict[str, Any]:
    """Ten widths after the first: no variant more, and how long the slowest took."""
    train_once(512)
    before = variants()
    slowest = 0.0
    for channels in (128, 136, 160, 200, 248, 256, 320, 328, 440, 496):
        start = time.perf_counter()
        train_once(channels)
        slowest = max(slowest, time.perf_counter() - start)
    passed = variants() == before
    print(f"{'PASS' if passed else 'FAIL'}: ten new widths, {sum(before.values())} variants before")
    print(f"  and {sum(variants().values())} after; the slowest first sight {slowest * 1e3:.1f} ms")
    return {"passed": passed, "variants": dict(variants()), "slowest_ms": slowest * 1e3}


# Speed


@dataclass(frozen=True)
class Layer:
    """A depthwise convolution (with a stride) or a batch norm with ReLU, at one shape."""

    images: int
    channels: int
    size: int
    stride: int = 0


def mobilenet_layers(pixels: int, width: float) -> Counter[Layer]:
    """The depthwise convolutions and batch norms of MobileNet v1, with how often each occurs."""
    images, size, second_stride = (256, 112, 2) if pixels == 224 else (512, 32, 1)
    channels = int(32 * width)
    layers = Counter([Layer(images, channels, size)])
    stages = [(64, 1, 1), (128, second_stride, 2), (256, 2, 2), (512, 2, 6), (1024, 2, 2)]
    for out_channels, stage_stride, blocks in stages:
        for block in range(blocks):
            stride = stage_stride if block == 0 else 1
            layers[Layer(images, channels, size, stride)] += 1
            size //= stride
            layers[Layer(images, channels, size)] += 1
            channels = int(out_channels * width)
            layers[Layer(images, channels, size)] += 1
    return layers


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """The median time of one call, from replays of a CUDA graph that holds all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in [*calls, *calls]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def rotation(layer: Layer) -> range:
    """So many sets of inputs that the cache does not hold them."""
    elements = layer.images * layer.channels * layer.size**2
    return range(max(1, min(8, round(ROTATED_BYTES / (2 * elements)))))


def time_depthwise(layer: Layer, with_torch: bool = True) -> dict[str, tuple[float, ...]]:
    """By pass: our microseconds, PyTorch's, and those of the memory traffic."""
    stride, channels = layer.stride, layer.channels
    filters = torch.randn(channels, 1, 3, 3, device="cuda")
    half = filters.bfloat16()
    size = (layer.size - 1) // stride + 1
    pairs = [
        (
            channels_last(layer.images, channels, layer.size, layer.size),
            channels_last(layer.images, channels, size, size),
        )
        for _ in rotation(layer)
    ]
    given, made = (t.numel() * 2 / COPY_BANDWIDTH * 1e6 for t in pairs[0])
    floors = {"depthwise y": given + made, "depthwise gradients": 2 * given + made}

    both, fixed = [stride] * 2, ([1, 1], [1, 1], False, [0, 0], channels)
    backward = partial(partial, torch.ops.aten.convolution_backward)
    ours: dict[str, list[Callable[[], object]]] = {
        "depthwise y": [partial(depthwise, x, filters, stride, 1) for x, _ in pairs],
        "depthwise gradients": [
            partial(depthwise_backward, x, dy, filters, stride, 1) for x, dy in pairs
        ],
    }
    theirs = {
        "depthwise y": [
            partial(functional.conv2d, x, half, None, stride, 1, groups=channels) for x, _ in pairs
        ],
        "depthwise gradients": [
            backward(dy, x, half, None, both, *fixed, [True, True, False]) for x, dy in pairs
        ],
    }
    times = {
        name: (
            microseconds(ours[name]),
            microseconds(theirs[name]) if with_torch else 0.0,
            floors[name],
        )
        for name in ours
    }
    return times | time_norm_and_depthwise(pairs, filters, stride, with_torch)


def time_norm_and_depthwise(
    pairs: list[tuple[Tensor, Tensor]], filters: Tensor, stride: int, with_torch: bool
) -> dict[str, tuple[float, ...]]:
    """Batch norm, ReLU and the depthwise convolution after it, with statistics of its output."""
    channels = filters.shape[0]
    weight, bias = (torch.ones(channels, device="cuda").requires_grad_() for _ in range(2))
    mean, variance = torch.zeros(2, channels, device="cuda")
    parameters = (weight, bias, filters.requires_grad_())

    def ours(x: Tensor) -> Tensor:
        norm = kernels.deferred_norm(x, weight, bias, mean, variance, 0.1, 1e-5, "relu")
        return kernels.depthwise_conv2d_with_statistics(x, filters, stride, 1, norm)[0]

    def theirs(x: Tensor) -> Tensor:
        z = functional.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5)
        half = filters.bfloat16()
        z = functional.relu(z, inplace=True)
        return functional.conv2d(z, half, None, stride, 1, groups=channels)

    given, made = (t.numel() * 2 / COPY_BANDWIDTH * 1e6 for t in pairs[0])
    inputs = [(x.requires_grad_(), dy) for x, dy in pairs]
    mine = forward_and_backward(ours, inputs, parameters)
    other = forward_and_backward(theirs, inputs, parameters) if with_torch else (0.0, 0.0)
    return {
        "norm, depthwise y": (mine[0], other[0], 2 * given + made),
        "norm, depthwise gradients": (mine[1], other[1], 5 * given + made),
    }


def forward_and_backward(
    function: Callable[[Tensor], Tensor],
    pairs: Sequence[tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
) -> tuple[float, float]:
    """Microseconds of the forward pass, and of both passes less the forward pass."""

    def both(x: Tensor, dy: Tensor) -> object:
        return torch.autograd.grad(function(x), (x, *parameters), dy)

    forward = microseconds([partial(function, x) for x, _ in pairs])
    return forward, microseconds([partial(both, x, dy) for x, dy in pairs]) - forward


def time_batch_norm(layer: Layer, with_torch: bool = True) -> dict[str, tuple[float, ...]]:
    """By pass, as above; the backward pass is both passes less the forward pass."""
    shape = (layer.images, layer.channels, layer.size, layer.size)
    weight, bias = (torch.ones(layer.channels, device="cuda").requires_grad_() for _ in range(2))
    mean, variance = torch.zeros(2, layer.channels, device="cuda")
    pairs = [
        (channels_last(*shape).requires_grad_(), channels_last(*shape)) for _ in rotation(layer)
    ]

    def ours(x: Tensor) -> Tensor:
        return kernels.batch_norm_act(x, weight, bias, mean, variance, 0.1, 1e-5, "relu")

    def theirs(x: Tensor) -> Tensor:
        return functional.relu(
            functional.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5), inplace=True
        )

    one = pairs[0][0].numel() * 2 / COPY_BANDWIDTH * 1e6
    mine = forward_and_backward(ours, pairs, (weight, bias))
    other = forward_and_backward(theirs, pairs, (weight, bias)) if with_torch else (0.0, 0.0)
    return {
        "batch norm y": (mine[0], other[0], 3 * one),
        "batch norm dx": (mine[1], other[1], 5 * one),
    }


def time_network(pixels: int, width: float, with_torch: bool = True) -> list[dict[str, Any]]:
    """Every layer of the network once."""
    rows = []
    for layer, count in mobilenet_layers(pixels, width).items():
        time_layer = time_depthwise if layer.stride else time_batch_norm
        for name, (ours, theirs, floor) in time_layer(layer, with_torch).items():
            rows.append(
                asdict(layer)
                | {"pixels": pixels, "width": width, "pass": name, "count": count}
                | {"ours_us": ours, "torch_us": theirs, "floor_us": floor}
            )
        torch.cuda.empty_cache()
    return rows


def print_layers(rows: list[dict[str, Any]]) -> None:
    """One line a layer and pass."""
    print(f"\n{'pass':26}{'shape':>22} s  times    ours us   torch us   TB/s")
    for row in rows:
        shape = f"{row['images']}x{row['size']}x{row['size']}x{row['channels']}"
        speed = row["floor_us"] / row["ours_us"] * COPY_BANDWIDTH / 1e12
        print(
            f"{row['pass']:26}{shape:>22} {row['stride'] or ' '}  {row['count']:5}"
            f"{row['ours_us']:11.1f}{row['torch_us']:11.1f}{speed:7.2f}"
        )


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All layers of a network together, a row a pass."""
    totals: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        total = totals.setdefault((row["pixels"], row["width"], row["pass"]), [0.0, 0.0, 0.0])
        for i, key in enumerate(["ours_us", "torch_us", "floor_us"]):
            total[i] += row["count"] * row[key] / 1e3
    print(f"\n{'MobileNet v1':16}{'pass':26}{'ours ms':>9}{'torch ms':>10}{'floor ms':>10}", end="")
    print(f"{'faster':>9}{'TB/s':>7}{'of 4.3':>8}")
    summary = []
    for (pixels, width, name), (ours, theirs, floor) in totals.items():
        share = floor / ours
        print(
            f"{f'{pixels} px, {width}':16}{name:26}{ours:9.3f}{theirs:10.3f}{floor:10.3f}"
            f"{theirs / ours:8.2f}x{share * COPY_BANDWIDTH / 1e12:7.2f}{share:8.0%}"
        )
        summary.append(
            {"pixels": pixels, "width": width, "pass": name, "ours_ms": ours}
            | {"torch_ms": theirs, "floor_ms": floor}
        )
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--processes", type=int, default=8, help="processes that compile and check")
    arguments = parser.parse_args()
    if not kernels.available():
        print("no CUDA device, or no Triton: nothing to check")
        return 1
    started = time.perf_counter()
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(sys.argv),
    }
    record["checks"] = check_everything(arguments.processes)
    record["new_widths"] = check_new_widths()
    passed = record["new_widths"]["passed"] and all(row["passed"] for row in record["checks"])
    record["layers"] = [
        row for pixels in (224, 32) for width in (1.0, 0.25) for row in time_network(pixels, width)
    ]
    print_layers(record["layers"])
    record["summary"] = summarize(record["layers"])
    record["seconds"] = time.perf_counter() - started
    print(f"\n{'PASS' if passed else 'FAIL'} in {record['seconds']:.0f} s on {record['device']}")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
