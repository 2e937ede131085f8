"""Make the bundled part of Fashion-MNIST: the first 1,000 training and 200 test images per class.

    python scripts/make_bundled_fashion_mnist.py [FASHION_MNIST_FOLDER]
    python scripts/make_bundled_fashion_mnist.py --for-tuning DIR [FASHION_MNIST_FOLDER]

The images keep their order. Without a folder, Debian's package dataset-fashion-mnist is read. The
output is IDX files under xz. The same version of liblzma gives the same bytes; the files in the
package were made with 5.4.1.

With `--for-tuning` the package is unchanged. DIR gets the bundled training images, and in place of
test images 10,000 other training images, so that recipes can be tuned without test images:
`anywidth train --data fashion_mnist --data-dir DIR`.
"""

import argparse
import gzip
import lzma
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from anywidth.app.data.arrays import BUNDLED, FASHION_MNIST_CLASSES, load_arrays
from anywidth.app.data.order import choose_balanced

IMAGES_OF_A_CLASS = {"train": 1000, "t10k": 200}
FOR_TUNING = 10_000


def write_idx(path: Path, values: Tensor, compress: Callable[[bytes], bytes]) -> None:
    header = bytes((0, 0, 0x08, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(compress(header + values.contiguous().numpy().tobytes()))
    print(f"{path}: {tuple(values.shape)}, {path.stat().st_size} bytes")


def bundle(folder: str | None) -> None:
    def compress(data: bytes) -> bytes:
        return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)

    BUNDLED.mkdir(exist_ok=True)
    for prefix, count in IMAGES_OF_A_CLASS.items():
        arrays = load_arrays("fashion_mnist", folder, train=prefix == "train")
        chosen = choose_balanced(arrays.labels, count * len(FASHION_MNIST_CLASSES))
        write_idx(BUNDLED / f"{prefix}-images-idx3-ubyte.xz", arrays.images[chosen, 0], compress)
        write_idx(
            BUNDLED / f"{prefix}-labels-idx1-ubyte.xz", arrays.labels[chosen].byte(), compress
        )


def split_for_tuning(folder: str | None, out: Path) -> None:
    arrays = load_arrays("fashion_mnist", folder, train=True)
    bundled = choose_balanced(
        arrays.labels, IMAGES_OF_A_CLASS["train"] * len(FASHION_MNIST_CLASSES)
    )
    is_other = torch.ones(len(arrays.labels), dtype=torch.bool)
    is_other[bundled] = False
    others = is_other.nonzero()[:, 0]
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(0))
    out.mkdir(parents=True, exist_ok=True)
    for prefix, chosen in {"train": bundled, "t10k": others[order[:FOR_TUNING]].sort()[0]}.items():
        write_idx(out / f"{prefix}-images-idx3-ubyte.gz", arrays.images[chosen, 0], gzip.compress)
        labels = arrays.labels[chosen].byte()
        write_idx(out / f"{prefix}-labels-idx1-ubyte.gz", labels, gzip.compress)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", help="folder of Fashion-MNIST")
    parser.add_argument("--for-tuning", type=Path, metavar="DIR", help="write a split to tune by")
    arguments = parser.parse_args()
    if arguments.for_tuning is None:
        bundle(arguments.folder)
    else:
        split_for_tuning(arguments.folder, arguments.for_tuning)


if __name__ == "__main__":
    main()
