"""Time other block sizes of the kernels over MobileNet v1 at 224 px, full width and a quarter.

    python -m benchmarks.try_tiles --out tiles.json

Run it from the repository's root on a machine with a CUDA GPU; it takes a few minutes. The fastest
choices are the tables in ``anywidth/training/gpu/kernels/``.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

from anywidth.training.gpu import kernels
from anywidth.training.gpu.kernels import (
    batch_norm_backward,
    batch_norm_forward,
    depthwise_forward,
    depthwise_gradients,
)
from anywidth.training.gpu.kernels.depthwise_tiles import Tile
from benchmarks.kernels import Layer, mobilenet_layers, time_batch_norm, time_depthwise

TILES_TO_TRY = [
    *(Tile(2, 4, ahead) for ahead in (1, 2, 3)),
    *(Tile(4, 4, ahead) for ahead in (1, 2)),
    *(Tile(4, 2, ahead, positions=8, vectors=16) for ahead in (1, 2, 3)),
    Tile(2, 4, 2, positions=8, vectors=8, warps=2),
    Tile(4, 4, 1, positions=8, vectors=8, warps=2),
    Tile(2, 4, 2, positions=8, vectors=16),
    Tile(2, 8, 1),
    Tile(4, 2, 1, positions=4, vectors=32),
    Tile(8, 2, 1, positions=8, vectors=16),
    *(Tile(columns, 4, 1, positions=4, vectors=16, warps=2) for columns in (2, 4)),
]
BLOCKS_TO_TRY = [(32, 4), (32, 8), (64, 4), (64, 8), (128, 2), (128, 4)]


def try_tile(tile: Tile, stride: int, layers: list[tuple[Layer, int]]) -> dict[str, float]:
    """The milliseconds of each pass with one tile, over all layers of a stride."""
    for module in (depthwise_forward, depthwise_gradients):
        module.TILES[3, stride] = tile
    totals: dict[str, float] = defaultdict(float)
    for layer, count in layers:
        if layer.stride == stride:
            for name, times in time_depthwise(layer, with_torch=False).items():
                totals[name] += count * times[0] / 1e3
    return totals


def try_blocks(module: ModuleType, prefix: str, layers: list[tuple[Layer, int]]) -> Iterator[Any]:
    """The milliseconds of each pass with other block sizes of one batch norm kernel."""
    factor = 1 if prefix == "_SUM" else 4
    chosen = {name: getattr(module, name) for name in (f"{prefix}_ROWS", f"{prefix}_PROGRAMS")}
    for rows, programs in BLOCKS_TO_TRY:
        totals: dict[str, float] = defaultdict(float)
        vars(module).update({f"{prefix}_ROWS": rows, f"{prefix}_PROGRAMS": factor * programs})
        for layer, count in layers:
            if not layer.stride:
                for name, times in time_batch_norm(layer, with_torch=False).items():
                    totals[name] += count * times[0] / 1e3
        yield (rows, factor * programs), totals
    vars(module).update(chosen)


def sweep(processes: int) -> list[tuple[str, float, str]]:
    """Time other block sizes over MobileNet v1 at 224 px, full width and a quarter."""
    layers = [item for width in (1.0, 0.25) for item in mobilenet_layers(224, width).items()]
    tries = [(tile, stride) for stride in (1, 2) for tile in TILES_TO_TRY]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        compiling = [pool.submit(try_tile, *one, [(Layer(2, 32, 8, one[1]), 1)]) for one in tries]
        for one in compiling:
            one.result()
    rows = []
    for tile, stride in tries:
        for name, total in try_tile(tile, stride, layers).items():
            rows.append((f"{name} stride {stride}", total, str(tile)))
    forward, backward = batch_norm_forward, batch_norm_backward
    for module, prefix in [
        (forward, "_SUM"),
        (forward, "_NORMALIZE"),
        (backward, "_SUM"),
        (backward, "_INPUT"),
    ]:
        changed = "batch norm y" if module is forward else "batch norm dx"
        for choice, totals in try_blocks(module, prefix, layers):
            rows.append((f"{changed} {prefix}", totals[changed], str(choice)))
    for what, total, choice in sorted(rows):
        print(f"{what:36}{total:9.3f} ms  {choice}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--processes", type=int, default=8, help="processes that compile")
    arguments = parser.parse_args()
    if not kernels.available():
        raise SystemExit("no CUDA device, or no Triton: nothing to time")
    found = sweep(arguments.processes)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))
