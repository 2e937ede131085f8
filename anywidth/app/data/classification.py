"""The data of a classification task, by the name of the data set."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from anywidth.app.data.arrays import ARRAY_NAMES, ImageArrays, load_arrays
from anywidth.app.data.augment import Augmentation, channel_statistics
from anywidth.app.data.loader import DeviceLoader
from anywidth.app.data.order import ImageLoader, choose_balanced, hold_out
from anywidth.errors import AnywidthError

if TYPE_CHECKING:
    from anywidth.app.data.folder_augment import FolderAugmentation
    from anywidth.app.data.image_files import ImageFiles

HELD_OUT_SHARE = 0.1
EVALUATION_RESIZE = 256 / 224


class Epochs:
    """A loader that yields the next epoch each time it is read, in a new order."""

    def __init__(self, loader: ImageLoader) -> None:
        self.loader = loader
        self._next = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._next += 1
        return self.loader.epoch(self._next - 1)


@dataclass(frozen=True)
class ClassificationData:
    """The loaders of one data set, and its facts for models and predictions.

    ``calibration`` has the training samples, preprocessed as for evaluation and shuffled once.
    Images on the scale from 0 to 1 were normalised with ``mean`` and ``std``.
    """

    train: ImageLoader
    validation: ImageLoader
    calibration: ImageLoader
    classes: tuple[str, ...]
    input_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_facts: dict[str, object]
    """The numbers of training and validation images, before a limit or a split, and digests."""
    judging: ImageLoader
    """The images that a search judges by: those kept out of training, if there are any."""
    is_held_out: bool

    def check_files(self, *, skip_corrupt: bool, remember: bool) -> None:
        """Check all files of a folder before training; see `check_images`."""
        if not isinstance(self.train, DeviceLoader):
            from anywidth.app.data.folder import FolderLoader
            from anywidth.app.data.folder_check import check_images

            both = self.train, self.validation
            folders = [one for one in both if isinstance(one, FolderLoader)]
            check_images(folders, skip_corrupt=skip_corrupt, remember=remember)

    def facts(self) -> dict[str, object]:
        """How a run recognises the data that it was trained with."""
        return {"classes": list(self.classes), **self.image_facts}


def load_classification(
    name: str = "bundled",
    root: Path | str | None = None,
    *,
    batch_size: int = 128,
    evaluation_batch_size: int = 500,
    augmentation: "Augmentation | FolderAugmentation | None" = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    workers: int | None = None,
    image_size: int | None = None,
    limit: int | None = None,
    validation: Literal["test", "split"] = "test",
    skip_corrupt: bool = False,
    held_out: float = 0.0,
) -> ClassificationData:
    """Load a named set, or image folders: ``"folder"`` with ``root``, or a path as ``name``.

    Batch sizes count all ranks together. ``augmentation`` is an Augmentation for named sets and a
    FolderAugmentation for folders; None switches it off. ``limit`` keeps the first so many training
    images, with balanced classes. ``validation`` is the ``"test"`` set (``val/`` of a folder), or a
    ``"split"``: a tenth of the training images of each class, which is then not used for training
    and is the same for every seed. ``held_out`` is the share of the training images of each class
    that a search judges by; they too are not used for training and are the same for every seed.

    ``image_size`` (224 unless given), ``workers`` (one per core unless given) and ``skip_corrupt``
    are for folders; see FolderLoader.
    """
    if validation not in ("test", "split"):
        raise AnywidthError(f"validation={validation!r}: expected 'test' or 'split'")
    split = validation == "split"
    if name in ARRAY_NAMES:
        source = _open_named(name, root, augmentation, image_size, device, split)
    else:
        folder, size = _folder_of(name, root), 224 if image_size is None else image_size
        source = _open_folder(folder, augmentation, size, workers, skip_corrupt, split)
    trained, validated, judged = _choose(source.train.labels.cpu(), limit, split, held_out)
    mean, std = source.statistics(trained)
    judged = validated if judged is None else judged
    open_loader = partial(source.open_loader, mean=mean, std=std, device=device)
    evaluated = partial(open_loader, batch_size=evaluation_batch_size)
    ranks = {"rank": rank, "world_size": world_size}
    train = open_loader(
        source.train,
        batch_size=batch_size,
        seed=seed,
        augmentation=augmentation,
        shuffle=True,
        drop_last=True,
        positions=trained,
        **ranks,
    )
    plain = train.subset(train.samples, seed, batch_size=evaluation_batch_size)
    sets = {"training images": source.train, "validation images": source.validation}
    return ClassificationData(
        train=train,
        validation=evaluated(source.validation, positions=validated, **ranks),
        calibration=plain,
        classes=source.train.classes,
        input_shape=source.input_shape,
        mean=mean,
        std=std,
        image_facts={name: len(images) for name, images in sets.items()}
        | {f"digest of {name}": images.digest() for name, images in sets.items()},
        judging=plain if judged is None else evaluated(source.train, positions=judged),
        is_held_out=judged is not None,
    )


class _Source(NamedTuple):
    """Samples for training and validation, their loader, and the mean and deviation of some."""

    open_loader: Callable[..., ImageLoader]
    train: "ImageArrays | ImageFiles"
    validation: "ImageArrays | ImageFiles"
    input_shape: tuple[int, int, int]
    statistics: Callable[[Tensor], tuple[tuple[float, ...], tuple[float, ...]]]


def _open_named(
    name: str,
    root: Path | str | None,
    augmentation: "Augmentation | FolderAugmentation | None",
    image_size: int | None,
    device: torch.device | str,
    split: bool,
) -> _Source:
    if augmentation is not None and not isinstance(augmentation, Augmentation):
        raise AnywidthError(
            f"augmentation={augmentation} is for folders: pass an Augmentation for {name!r}"
        )
    arrays = load_arrays(name, root, train=True)
    channels, height, width = arrays.images.shape[1:]
    if image_size not in (None, height):
        raise AnywidthError(
            f"--image-size {image_size}, but the images of {name!r} are {height} x {width}: leave "
            "it out"
        )
    # Moved to the device here, so that all loaders share one copy.
    shared = arrays.to(device)
    return _Source(
        DeviceLoader,
        shared,
        shared if split else load_arrays(name, root, train=False),
        (channels, height, width),
        lambda chosen: channel_statistics(arrays.images[chosen]),
    )


def _open_folder(
    root: Path,
    augmentation: "Augmentation | FolderAugmentation | None",
    size: int,
    workers: int | None,
    skip_corrupt: bool,
    split: bool,
) -> _Source:
    from anywidth.app.data.decoding_workers import default_workers
    from anywidth.app.data.folder import IMAGENET_MEAN, IMAGENET_STD, FolderLoader
    from anywidth.app.data.image_files import check_same_classes, scan_split

    if isinstance(augmentation, Augmentation):
        raise AnywidthError(
            f"augmentation={augmentation} is for named sets: pass a FolderAugmentation for {root}"
        )
    train = scan_split(root, "train")
    validation = train if split else scan_split(root, "val")
    check_same_classes(train, validation)
    open_loader = partial(
        FolderLoader,
        size=size,
        resize=round(size * EVALUATION_RESIZE),
        workers=default_workers() if workers is None else workers,
        skip_corrupt=skip_corrupt,
    )
    statistics = IMAGENET_MEAN, IMAGENET_STD
    return _Source(open_loader, train, validation, (3, size, size), lambda chosen: statistics)


def _folder_of(name: str, root: Path | str | None) -> Path:
    if name == "folder":
        if root is None:
            raise AnywidthError(
                "--data folder needs the folder that contains train/ and val/: give it with "
                "--data-dir"
            )
        return Path(root)
    if os.sep in name or Path(name).is_dir():
        return Path(name)
    known = ", ".join(repr(known) for known in (*ARRAY_NAMES, "folder"))
    raise AnywidthError(
        f"no data set is named {name!r}: expected one of {known}, or the path of a folder"
    )


def _choose(
    labels: Tensor, limit: int | None, split: bool, held_out: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the positions for training, for validation by a split, and for judging."""
    trained, validated, judged = torch.arange(len(labels)), None, None
    # Independent of the run's seed, so that runs with different seeds can be compared.
    if split:
        trained, validated = hold_out(labels, HELD_OUT_SHARE, seed=0)
    if held_out > 0:
        kept, judged = hold_out(labels[trained], held_out, seed=1)
        trained, judged = trained[kept], trained[judged]
    if limit is not None and limit < len(trained):
        trained = trained[choose_balanced(labels[trained], limit)]
    return trained, validated, judged
