"""Make the bundled part of Fashion-MNIST: the first 1,000 training and 200 test images per class.

    python scripts/make_bundled_fashion_mnist.py [FASHION_MNIST_FOLDER]

The images keep their order. Without a folder, Debian's package dataset-fashion-mnist is read. The
output is IDX files under xz. The same version of liblzma gives the same bytes; the files in the
package were made with 5.4.1.
"""

import argparse
import lzma
import struct
from pathlib import Path

from torch import Tensor

from anywidth.app.data.arrays import BUNDLED, FASHION_MNIST_CLASSES, load_arrays
from anywidth.app.data.order import choose_balanced

IMAGES_OF_A_CLASS = {"train": 1000, "t10k": 200}


def write_idx(path: Path, values: Tensor) -> None:
    header = bytes((0, 0, 0x08, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    data = header + values.contiguous().numpy().tobytes()
    path.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    print(f"{path}: {tuple(values.shape)}, {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", help="folder of Fashion-MNIST")
    folder = parser.parse_args().folder
    BUNDLED.mkdir(exist_ok=True)
    for prefix, count in IMAGES_OF_A_CLASS.items():
        arrays = load_arrays("fashion_mnist", folder, train=prefix == "train")
        chosen = choose_balanced(arrays.labels, count * len(FASHION_MNIST_CLASSES))
        write_idx(BUNDLED / f"{prefix}-images-idx3-ubyte.xz", arrays.images[chosen, 0])
        write_idx(BUNDLED / f"{prefix}-labels-idx1-ubyte.xz", arrays.labels[chosen].byte())


if __name__ == "__main__":
    main()
