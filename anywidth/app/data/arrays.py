"""Image sets that fit into memory."""

import gzip
import hashlib
import lzma
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from anywidth.errors import AnywidthError
from anywidth.files import read_bytes

ARRAY_NAMES = {
    "bundled": "Fashion-MNIST (bundled)",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}
"""The sets by their name on the command line, and as people write them."""

BUNDLED = Path(__file__).parent / "bundled"
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
_CLOTHES = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
FASHION_MNIST_CLASSES = tuple(_CLOTHES.split(", "))


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """Images (uint8, samples x channels x height x width), labels (int64) and class names."""

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise AnywidthError(
                f"images are {images.dtype} of shape {tuple(images.shape)}: expected torch.uint8 "
                "of shape (samples, channels, height, width)"
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise AnywidthError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}: expected torch.int64 "
                f"of shape ({len(images)},), one per image"
            )

    def __len__(self) -> int:
        return len(self.images)

    def digest(self) -> str:
        """Differs for other images, labels, or another order of them."""
        whole = hashlib.blake2b(digest_size=12)
        for part in (self.images, self.labels):
            whole.update(part.cpu().contiguous().numpy().data)
        return whole.hexdigest()

    def to(self, device: torch.device | str) -> "ImageArrays":
        """Return the same samples on a device, without a copy if they are already there."""
        return ImageArrays(self.images.to(device), self.labels.to(device), self.classes)


def load_arrays(name: str, root: Path | str | None = None, train: bool = True) -> ImageArrays:
    """Load the training or test images of a named set from local files.

    ``bundled`` is a subset of Fashion-MNIST inside the package and does not read ``root``.
    ``fashion_mnist`` takes a folder of IDX files, as torchvision or Debian lay them out (Debian's
    own folder without ``root``). ``cifar10`` and ``cifar100`` take the folder that torchvision
    calls root, or one with the official binary files.
    """
    if name not in ARRAY_NAMES:
        raise AnywidthError(
            f"no image set is named {name!r}: expected one of {', '.join(map(repr, ARRAY_NAMES))}"
        )
    if name == "bundled":
        return _read_fashion_mnist([BUNDLED], train)
    if name == "fashion_mnist" and root is None:
        return _read_fashion_mnist([DEBIAN_FASHION_MNIST], train)
    if root is None:
        raise AnywidthError(
            f"{name} is not part of the package: give the folder of its files with --data-dir"
        )
    root = Path(root)
    if not root.is_dir():
        raise AnywidthError(f"{root} is not a folder: give the folder of the files with --data-dir")
    if name == "fashion_mnist":
        folders = [root, root / "FashionMNIST" / "raw", root / "raw", root / "fashion-mnist"]
        return _read_fashion_mnist(folders, train)
    from anywidth.app.data.cifar import CIFAR10, CIFAR100, read_cifar

    return _checked(*read_cifar(CIFAR10 if name == "cifar10" else CIFAR100, root, train))


def _read_fashion_mnist(folders: list[Path], train: bool) -> ImageArrays:
    prefix = "train" if train else "t10k"
    names = (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    for folder in folders:
        images_path, labels_path = (find_idx(folder, name) for name in names)
        if images_path and labels_path:
            images = read_idx(images_path, dimensions=3).unsqueeze(1)
            labels = read_idx(labels_path, dimensions=1).long()
            if len(images) != len(labels):
                raise AnywidthError(
                    f"{labels_path} has {len(labels)} labels: expected {len(images)}, one per "
                    f"image of {images_path.name}; download both files again"
                )
            return _checked(images, labels, FASHION_MNIST_CLASSES, labels_path)
    endings = ", ".join(repr(suffix) for suffix in SUFFIXES[1:])
    raise AnywidthError(
        f"Fashion-MNIST was not found: expected {names[0]} and {names[1]} (plain or ending in "
        f"{endings}) in one of {', '.join(map(str, folders))}; give the folder of the files "
        "with --data-dir, or install Debian's package "
        "dataset-fashion-mnist"
    )


def _checked(images: Tensor, labels: Tensor, classes: tuple[str, ...], path: Path) -> ImageArrays:
    if len(images) == 0:
        raise AnywidthError(f"{path} has no images: download the file again")
    if int(labels.max()) >= len(classes):
        raise AnywidthError(
            f"{path} has the label {int(labels.max())}: expected 0 to {len(classes) - 1}; "
            "the file belongs to another image set"
        )
    return ImageArrays(images, labels, classes)


# ---- the IDX format ------------------------------------------------------------------------------


SUFFIXES = ("", ".gz", ".xz")
UNSIGNED_BYTE = 0x08


def find_idx(folder: Path, name: str) -> Path | None:
    """Return the file of that name, plain or compressed, or None."""
    candidates = (folder / f"{name}{suffix}" for suffix in SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an IDX file of unsigned bytes into a uint8 tensor with ``dimensions`` axes."""
    data = _decompress(path)
    header_size = 4 + 4 * dimensions
    expected_magic = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    if data[:4] != expected_magic or len(data) < header_size:
        raise AnywidthError(
            f"{path} starts with {data[:4].hex() or 'nothing'}: expected {expected_magic.hex()}, "
            f"an IDX file of bytes with {dimensions} dimensions; download the file again"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header_size])
    expected_size = header_size + math.prod(shape)
    if len(data) != expected_size:
        raise AnywidthError(
            f"{path} has {len(data)} bytes (decompressed): expected {expected_size} for the "
            f"shape {shape} in its header; download the file again"
        )
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8, offset=header_size).view(shape)


def _decompress(path: Path) -> bytearray:
    raw = read_bytes(path)
    decompress = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)
    try:
        return bytearray(decompress(raw))
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise AnywidthError(
            f"{path} ({len(raw)} bytes) does not decompress ({error}): expected a complete "
            f"{path.suffix} file; download it again"
        ) from error
