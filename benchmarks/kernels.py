"""Time the GPU kernels against eager bfloat16 PyTorch.

    python -m benchmarks.kernels --out benchmarks/results/kernels.json

Run it from the repository's root on a machine with a CUDA GPU. The layers of MobileNet v1 are timed
as CUDA graphs. The last table has, summed over all layers of the network, the time of these
kernels, of PyTorch, and of the memory traffic that no implementation can avoid.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from anywidth.training.gpu import kernels
from anywidth.training.gpu.kernels.depthwise_forward import depthwise_forward as depthwise
from anywidth.training.gpu.kernels.depthwise_gradients import (
    depthwise_gradients as depthwise_backward,
)
from anywidth.training.gpu.kernels.stem_convolution import stem_forward, stem_weight_gradient
from benchmarks.records import circumstances, write_record

COPY_BANDWIDTH = 4.3e12  # bytes per second of a large copy on an H200
ROTATED_BYTES = 200e6  # inputs rotate over this much memory, more than the cache holds


@dataclass(frozen=True)
class Layer:
    """A depthwise convolution (with a stride) or a batch norm with ReLU, at one shape."""

    images: int
    channels: int
    size: int
    stride: int = 0


def channels_last(*shape: int) -> Tensor:
    """Normal random numbers in bfloat16."""
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    return x.contiguous(memory_format=torch.channels_last)


def mobilenet_layers(pixels: int, width: float) -> Counter[Layer]:
    """The depthwise convolutions and batch norms of MobileNet v1, and how often each occurs."""
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
    """The median time of one call, from replays of a CUDA graph of all calls."""
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
    """Enough sets of inputs to exceed the cache."""
    elements = layer.images * layer.channels * layer.size**2
    return range(max(1, min(8, round(ROTATED_BYTES / (2 * elements)))))


def time_depthwise(layer: Layer) -> dict[str, tuple[float, ...]]:
    """Microseconds per pass: ours, PyTorch's, and those of the memory traffic."""
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
            microseconds(theirs[name]),
            floors[name],
        )
        for name in ours
    }
    return times | time_norm_and_depthwise(pairs, filters, stride)


def time_norm_and_depthwise(
    pairs: list[tuple[Tensor, Tensor]], filters: Tensor, stride: int
) -> dict[str, tuple[float, ...]]:
    """Batch norm, ReLU and the depthwise convolution after them, with output statistics."""
    channels = filters.shape[0]
    weight, bias = (torch.ones(channels, device="cuda").requires_grad_() for _ in range(2))
    mean, variance = torch.zeros(2, channels, device="cuda")
    norm = kernels.BatchNorm(weight, bias, "relu", mean, variance)
    parameters = (weight, bias, filters.requires_grad_())

    def ours(x: Tensor) -> Tensor:
        before = kernels.deferred_norm(x, norm)
        return kernels.depthwise_conv2d_with_statistics(x, filters, stride, 1, before)[0]

    def theirs(x: Tensor) -> Tensor:
        z = functional.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5)
        half = filters.bfloat16()
        z = functional.relu(z, inplace=True)
        return functional.conv2d(z, half, None, stride, 1, groups=channels)

    given, made = (t.numel() * 2 / COPY_BANDWIDTH * 1e6 for t in pairs[0])
    inputs = [(x.requires_grad_(), dy) for x, dy in pairs]
    mine = forward_and_backward(ours, inputs, parameters)
    other = forward_and_backward(theirs, inputs, parameters)
    return {
        "norm, depthwise y": (mine[0], other[0], 2 * given + made),
        "norm, depthwise gradients": (mine[1], other[1], 5 * given + made),
    }


def forward_and_backward(
    function: Callable[[Tensor], Tensor],
    pairs: Sequence[tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
) -> tuple[float, float]:
    """Microseconds of the forward pass, and of both passes minus the forward pass."""

    def both(x: Tensor, dy: Tensor) -> object:
        return torch.autograd.grad(function(x), (x, *parameters), dy)

    forward = microseconds([partial(function, x) for x, _ in pairs])
    return forward, microseconds([partial(both, x, dy) for x, dy in pairs]) - forward


def time_batch_norm(layer: Layer) -> dict[str, tuple[float, ...]]:
    """As in `time_depthwise`; the backward pass is both passes minus the forward pass."""
    shape = (layer.images, layer.channels, layer.size, layer.size)
    weight, bias = (torch.ones(layer.channels, device="cuda").requires_grad_() for _ in range(2))
    mean, variance = torch.zeros(2, layer.channels, device="cuda")
    pairs = [
        (channels_last(*shape).requires_grad_(), channels_last(*shape)) for _ in rotation(layer)
    ]

    def ours(x: Tensor) -> Tensor:
        return kernels.batch_norm_act(x, kernels.BatchNorm(weight, bias, "relu", mean, variance))

    def theirs(x: Tensor) -> Tensor:
        return functional.relu(
            functional.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5), inplace=True
        )

    one = pairs[0][0].numel() * 2 / COPY_BANDWIDTH * 1e6
    mine = forward_and_backward(ours, pairs, (weight, bias))
    other = forward_and_backward(theirs, pairs, (weight, bias))
    return {
        "batch norm y": (mine[0], other[0], 3 * one),
        "batch norm dx": (mine[1], other[1], 5 * one),
    }


def time_picture(pixels: int, width: float) -> list[dict[str, Any]]:
    """The convolution of the images; only its filters have a gradient."""
    images, stride = (256, 2) if pixels == 224 else (512, 1)
    layer = Layer(images, int(32 * width), pixels // stride, stride)
    filters = torch.randn(layer.channels, 3, 3, 3, device="cuda")
    half = filters.bfloat16()
    pairs = [
        (
            channels_last(images, 3, pixels, pixels),
            channels_last(images, layer.channels, layer.size, layer.size),
        )
        for _ in rotation(layer)
    ]
    backward = torch.ops.aten.convolution_backward
    both, fixed = [stride] * 2, ([1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    calls: dict[str, tuple[list[Callable[[], object]], list[Callable[[], object]]]] = {
        "picture y": (
            [partial(stem_forward, x, filters, layer.channels, stride, 1, True) for x, _ in pairs],
            [partial(functional.conv2d, x, half, None, stride, 1) for x, _ in pairs],
        ),
        "picture gradient": (
            [partial(stem_weight_gradient, x, dy, filters, stride, 1) for x, dy in pairs],
            [partial(backward, dy, x, half, None, both, *fixed) for x, dy in pairs],
        ),
    }
    floor = sum(t.numel() for t in pairs[0]) * 2 / COPY_BANDWIDTH * 1e6
    return [
        asdict(layer)
        | {"pixels": pixels, "width": width, "pass": name, "count": 1, "floor_us": floor}
        | {"ours_us": microseconds(ours)}
        | {"torch_us": microseconds(theirs)}
        for name, (ours, theirs) in calls.items()
    ]


def time_network(pixels: int, width: float) -> list[dict[str, Any]]:
    """Every layer of the network once."""
    rows = time_picture(pixels, width)
    for layer, count in mobilenet_layers(pixels, width).items():
        time_layer = time_depthwise if layer.stride else time_batch_norm
        for name, (ours, theirs, floor) in time_layer(layer).items():
            rows.append(
                asdict(layer)
                | {"pixels": pixels, "width": width, "pass": name, "count": count}
                | {"ours_us": ours, "torch_us": theirs, "floor_us": floor}
            )
        torch.cuda.empty_cache()
    return rows


def print_layers(rows: list[dict[str, Any]]) -> None:
    """Print one line per layer and pass."""
    print(f"\n{'pass':26}{'shape':>22} s  times    ours us   torch us   TB/s")
    for row in rows:
        shape = f"{row['images']}x{row['size']}x{row['size']}x{row['channels']}"
        speed = row["floor_us"] / row["ours_us"] * COPY_BANDWIDTH / 1e12
        print(
            f"{row['pass']:26}{shape:>22} {row['stride'] or ' '}  {row['count']:5}"
            f"{row['ours_us']:11.1f}{row['torch_us']:11.1f}{speed:7.2f}"
        )


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum over all layers of a network, one row per pass."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if not kernels.available():
        raise SystemExit("no CUDA device, or no Triton: nothing to time")
    started = time.perf_counter()
    record: dict[str, Any] = {**circumstances("cuda"), "triton": triton.__version__}
    record["layers"] = [
        row for pixels in (224, 32) for width in (1.0, 0.25) for row in time_network(pixels, width)
    ]
    print_layers(record["layers"])
    record["summary"] = summarize(record["layers"])
    record["seconds"] = time.perf_counter() - started
    print(f"\n{record['seconds']:.0f} s on {record['device']}")
    write_record(arguments.out, record)


if __name__ == "__main__":
    main()
