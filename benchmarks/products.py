"""Time pointwise convolutions with kernels of their own against the library's product.

    python3 -m benchmarks.products --out products.json

Each is timed with the batch norm and ReLU before it and the statistics for the norm after it,
forward and backward, in bfloat16, as CUDA graphs. The alternative is what a step does otherwise: a
norm, the library's product, and a pass for the statistics.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from anywidth.training.gpu import fast_convolutions, kernels
from anywidth.training.gpu.kernels.batch_norm_forward import batch_terms
from benchmarks.kernels import COPY_BANDWIDTH, channels_last, forward_and_backward
from benchmarks.records import circumstances, write_record


@dataclass(frozen=True)
class Product:
    """A pointwise convolution: images, pixels per side, channels that it reads and makes."""

    images: int
    size: int
    read: int
    made: int

    def narrowed(self, width: float) -> Product:
        channels = (max(8, round(c * width / 8) * 8) for c in (self.read, self.made))
        return Product(self.images, self.size, *channels)


# Of MobileNet v1, MobileNet v2 (the second of two) and ResNet-50 at 224 px, then v1 at 32 px.
PRODUCTS = [
    *(Product(256, 112, 32, 64), Product(256, 56, 64, 128), Product(256, 56, 128, 128)),
    *(Product(256, 28, 128, 256), Product(256, 28, 256, 256)),
    *(Product(256, 112, 32, 16), Product(256, 56, 96, 24), Product(256, 56, 144, 24)),
    *(Product(256, 28, 192, 32), Product(256, 56, 64, 256)),
    *(Product(512, 32, 32, 64), Product(512, 32, 64, 128), Product(512, 16, 128, 256)),
]


def time_product(product: Product, full: Product) -> dict[str, float]:
    """Microseconds of both ways, forward and backward, and of the traffic that the kernels need."""
    read, made = product.read, product.made
    filters = torch.randn(full.made, full.read, 1, 1, device="cuda")
    scale, shift = (torch.ones(full.read, device="cuda").requires_grad_() for _ in range(2))
    following = [torch.ones(full.made, device="cuda") for _ in range(2)]
    x_elements = product.images * product.size**2 * read
    count = max(1, min(8, round(2e8 / (2 * x_elements))))
    pairs = [
        (
            channels_last(product.images, read, product.size, product.size).requires_grad_(),
            channels_last(product.images, made, product.size, product.size),
        )
        for _ in range(count)
    ]
    half = filters.bfloat16().requires_grad_()
    norm = kernels.BatchNorm(scale, shift, "relu")
    after = kernels.BatchNorm(following[0], following[1])

    def ours(x: Tensor) -> Tensor:
        before = kernels.deferred_norm(x, norm)
        y, partial_statistics = kernels.pointwise_conv2d_with_statistics(x, half, made, before)
        kernels.deferred_norm(y.detach(), after, partial_statistics)
        return y

    def library(x: Tensor) -> Tensor:
        z = kernels.batch_norm_act(x, norm)
        y = fast_convolutions.product(z.permute(0, 2, 3, 1), half, made, read).permute(0, 3, 1, 2)
        batch_terms(y.detach(), after)
        return y

    parameters = (scale, shift, half)
    mine = forward_and_backward(ours, pairs, parameters)
    theirs = forward_and_backward(library, pairs, parameters)
    one = 2 / COPY_BANDWIDTH * 1e6
    x_us, y_us = x_elements * one, x_elements // read * made * one
    return {
        "ours_forward_us": mine[0],
        "library_forward_us": theirs[0],
        "floor_forward_us": 2 * x_us + y_us,
        "ours_backward_us": mine[1],
        "library_backward_us": theirs[1],
        "floor_backward_us": 6 * x_us + 2 * y_us,
    }


def main() -> None:
    """Time all products and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--widths", default="1.0,0.5,0.25", help="default: %(default)s")
    arguments = parser.parse_args()
    if not kernels.available():
        raise SystemExit("no CUDA device, or no Triton: nothing to time")
    rows = []
    print(
        f"{'pixels x read x made':>26} {'forward: ours':>14} {'library':>8} {'floor':>6} ", end=""
    )
    print(f"{'backward: ours':>15} {'library':>8} {'floor':>6} {'library / ours':>15}")
    for full in PRODUCTS:
        for width in map(float, arguments.widths.split(",")):
            product = full.narrowed(width)
            times = time_product(product, full)
            rows.append({**asdict(product), "width": width, **times})
            shape = (
                f"{product.images}x{product.size}x{product.size} x {product.read} x {product.made}"
            )
            both = [
                sum(times[f"{way}_{one}_us"] for one in ("forward", "backward"))
                for way in ("ours", "library")
            ]
            print(
                f"{shape:>26} {times['ours_forward_us']:14.0f} {times['library_forward_us']:8.0f} "
                f"{times['floor_forward_us']:6.0f} {times['ours_backward_us']:15.0f} "
                f"{times['library_backward_us']:8.0f} {times['floor_backward_us']:6.0f} "
                f"{both[1] / both[0]:15.2f}",
                flush=True,
            )
        torch.cuda.empty_cache()
    write_record(arguments.out, {**circumstances("cuda"), "products": rows})


if __name__ == "__main__":
    main()
