"""CIFAR-10 and CIFAR-100, from the official binary files or torchvision's pickles."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anywidth.errors import AnywidthError, packages_for
from anywidth.files import read_bytes

PIXELS = 3 * 32 * 32

CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


@dataclass(frozen=True)
class BinaryLayout:
    """The files of the official binary version; a record is the label bytes, then the pixels."""

    name: str
    folder: str
    pickle_folder: str
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    official_records: tuple[int, int]
    label_bytes: int
    classes: tuple[str, ...]


CIFAR10 = BinaryLayout(
    name="CIFAR10",
    folder="cifar-10-batches-bin",
    pickle_folder="cifar-10-batches-py",
    train_files=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test_files=("test_batch.bin",),
    official_records=(10_000, 10_000),
    label_bytes=1,
    classes=tuple(CIFAR10_CLASSES.split()),
)

# The coarse label comes first, then the fine label, which is used.
CIFAR100 = BinaryLayout(
    name="CIFAR100",
    folder="cifar-100-binary",
    pickle_folder="cifar-100-python",
    train_files=("train.bin",),
    test_files=("test.bin",),
    official_records=(50_000, 10_000),
    label_bytes=2,
    classes=tuple(CIFAR100_CLASSES.split()),
)


def read_cifar(
    layout: BinaryLayout, root: Path, train: bool
) -> tuple[Tensor, Tensor, tuple[str, ...], Path]:
    """Return images, labels, class names and the path, from either layout.

    If both layouts are present, the binary files are read, because they cannot execute code.
    """
    names = layout.train_files if train else layout.test_files
    folders = (root, root / layout.folder)
    for folder in folders:
        missing = [name for name in names if not (folder / name).is_file()]
        if missing == list(names):
            continue
        if missing:
            raise AnywidthError(
                f"{folder} lacks {', '.join(missing)}: expected {', '.join(names)}; download them "
                "again"
            )
        records = torch.cat([_read_records(layout, folder / name, train) for name in names])
        labels = records[:, layout.label_bytes - 1].long()
        images = records[:, layout.label_bytes :].reshape(-1, 3, 32, 32).contiguous()
        return images, labels, layout.classes, folder / names[0]
    parent = root.parent if root.name == layout.pickle_folder else root
    if (parent / layout.pickle_folder).is_dir():
        return _read_pickles(layout, parent, train)
    raise AnywidthError(
        f"{layout.name} was not found: expected {', '.join(names)} in {folders[0]} or {folders[1]} "
        f"(binary version), or torchvision's folder {root / layout.pickle_folder}; give the "
        "folder of the files with --data-dir"
    )


def _read_records(layout: BinaryLayout, path: Path, train: bool) -> Tensor:
    data, size = bytearray(read_bytes(path)), layout.label_bytes + PIXELS
    if len(data) == 0 or len(data) % size:
        official = layout.official_records[0 if train else 1]
        raise AnywidthError(
            f"{path} has {len(data)} bytes: expected {official * size} ({official} images), or "
            f"another multiple of {size}; download it again"
        )
    return torch.frombuffer(data, dtype=torch.uint8).view(-1, size)


def _read_pickles(
    layout: BinaryLayout, root: Path, train: bool
) -> tuple[Tensor, Tensor, tuple[str, ...], Path]:
    instead = "'anywidth[cli]', or download the binary version of the files"
    with packages_for(str(root / layout.pickle_folder), instead):
        from torchvision import datasets

    kind, folder = getattr(datasets, layout.name), root / layout.pickle_folder
    with warnings.catch_warnings():
        # The pickles were written with `align=0`, which some releases of NumPy 2.4 warn about.
        warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed")
        try:
            dataset = kind(root, train=train, download=False)
        except RuntimeError as error:
            raise AnywidthError(
                f"{folder} is not what torchvision.datasets.{layout.name} expects: "
                f"{_pickle_faults(kind, folder)}; download it again"
            ) from error
    images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
    labels = torch.tensor(dataset.targets, dtype=torch.int64)
    return images, labels, tuple(dataset.classes), folder


def _pickle_faults(kind: Any, folder: Path) -> str:
    from torchvision.datasets.utils import check_integrity

    files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    faults = []
    for name, checksum in files:
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif not check_integrity(str(path), checksum):
            faults.append(f"{name} ({path.stat().st_size} bytes) differs from its MD5 {checksum}")
    return ", ".join(faults)
