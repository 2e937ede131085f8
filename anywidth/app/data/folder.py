"""Batches from a folder of image files in ImageNet's layout, decoded by worker processes."""

import logging
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from anywidth.app.data import decoding_workers
from anywidth.app.data.augment import normalize
from anywidth.app.data.folder_images import (
    FolderAugmentation,
    FolderBatch,
    FolderImages,
    ImageFiles,
    scan_folder,
)
from anywidth.app.data.order import BatchOrder, ImageLoader
from anywidth.errors import AnywidthError, few_of

logger = logging.getLogger(__name__)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def scan_split(root: Path, split: str) -> ImageFiles:
    """List the images of ``root/split``, where split is ``train`` or ``val``."""
    folder = root / split
    if not folder.is_dir():
        found = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
        raise AnywidthError(
            f"{folder} is not a folder: expected train/ and val/ in {root}, each with one folder "
            f"per class (found: {few_of(found) or 'nothing'})"
        )
    return scan_folder(folder)


def check_same_classes(train: ImageFiles, validation: ImageFiles) -> None:
    """Refuse folders whose classes differ, because labels would have different meanings."""
    only_train = sorted(set(train.classes) - set(validation.classes))
    only_validation = sorted(set(validation.classes) - set(train.classes))
    if only_train or only_validation:
        raise AnywidthError(
            f"{train.folder} and {validation.folder} have different classes: only the first has "
            f"{few_of(only_train) or 'none'}, only the second {few_of(only_validation) or 'none'}; "
            "expected the same subfolders in both"
        )


class FolderLoader(ImageLoader):
    """Yield normalised (images, labels) batches of image files.

    The order is drawn from (seed, epoch), and the augmentation of an image from (seed, epoch,
    index), so that ranks, workers and a resumed epoch agree. Batches are split as in DeviceLoader.

    A file that does not decode stops the epoch with an error that names it. With ``skip_corrupt``
    it is skipped and its batch is shorter; ``corrupt`` then maps these files to the reasons, and a
    log line names them at the end of the epoch. If no image of a part decodes, the part is empty,
    or with ``drop_last``, as in training, an error is raised.

    Worker processes are kept between epochs and serve one epoch at a time: starting another epoch
    ends the current one.
    """

    def __init__(
        self,
        files: ImageFiles,
        *,
        size: int = 224,
        resize: int = 256,
        augmentation: FolderAugmentation | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        device: torch.device | str = "cpu",
        workers: int = 4,
        skip_corrupt: bool = False,
        positions: Tensor | None = None,
        **order: Any,
    ) -> None:
        """Augmentation replaces resize and crop; ``positions``, ``order`` as in ImageLoader."""
        if not 1 <= size <= resize:
            raise AnywidthError(
                f"size={size}, resize={resize}: expected 1 <= size <= resize: a square of size "
                "is cut from an image whose shorter side is resize"
            )
        self.files = files
        self.size, self.resize = size, resize
        self.workers = workers
        self.skip_corrupt = skip_corrupt
        super().__init__(len(files), mean, std, augmentation, device, positions, **order)

    def _prepare(self) -> None:
        self.corrupt: dict[str, str] = {}
        on_cuda = self.device.type == "cuda"
        self._copies = torch.cuda.Stream(self.device) if on_cuda else None
        self._sampler = _RankBatches(self.order, self.positions)
        images = FolderImages(
            self.files,
            size=self.size,
            resize=self.resize,
            augmentation=self.augmentation,
            seed=self.order.seed,
        )
        self._decoded = DataLoader(
            images,
            batch_sampler=self._sampler,
            num_workers=self.workers,
            collate_fn=images.collate,
            pin_memory=on_cuda,
            persistent_workers=self.workers > 0,
            worker_init_fn=_leave_interrupts_to_the_parent,
            # Otherwise it would draw from the global generator at every epoch.
            generator=torch.Generator(),
        )
        self._epoch_under_way = object()

    def paths(self) -> Iterator[Path]:
        """The files that this loader reads."""
        places = range(len(self.files)) if self.positions is None else self.positions.tolist()
        return (self.files.path(place) for place in places)

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        token = self._epoch_under_way = object()
        self._sampler.epoch, self._sampler.start = epoch, start
        skipped: list[str] = []
        for batch in decoding_workers.watched(self._decoded):
            self._account_for_faults(batch)
            skipped.extend(path for path, _ in batch.corrupt)
            images = normalize(self._to_device(batch.images), self._mean, self._std)
            yield images, self._to_device(batch.labels)
            if self._epoch_under_way is not token:
                raise AnywidthError(
                    f"epoch {epoch} was not finished when another epoch of the same loader "
                    "started: finish one before the next, or use two loaders"
                )
        if skipped:
            logger.warning(
                "skipped %d corrupt image%s in epoch %d: %s",
                len(skipped),
                "" if len(skipped) == 1 else "s",
                epoch,
                few_of(skipped),
            )

    def _account_for_faults(self, batch: FolderBatch) -> None:
        if batch.unreadable:
            path, reason = batch.unreadable[0]
            raise AnywidthError(
                f"{path} cannot be read ({reason}), but it existed when the loader was made: check "
                "the disk and the file's permissions"
            )
        if not batch.corrupt:
            return
        if not self.skip_corrupt:
            path, reason = batch.corrupt[0]
            raise AnywidthError(
                f"{path} is not a whole image ({reason}): replace or remove it, or skip such "
                "files with --skip-corrupt"
            )
        self.corrupt.update(batch.corrupt)
        if self.order.drop_last and len(batch.images) == 0:
            raise AnywidthError(
                f"a batch is empty because all {len(batch.corrupt)} of its images are corrupt "
                f"({few_of([path for path, _ in batch.corrupt])}): replace or remove them"
            )

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Copy on a separate stream, so that the next batch arrives while the GPU computes."""
        if self._copies is None:
            return tensor.to(self.device)
        computation = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            copied = tensor.to(self.device, non_blocking=True)
        computation.wait_stream(self._copies)
        copied.record_stream(computation)
        return copied


class _RankBatches(Sampler[list[tuple[int, int]]]):
    """This rank's (epoch, index) pairs per step, for the current epoch and start."""

    def __init__(self, order: BatchOrder, positions: Tensor | None) -> None:
        self.order = order
        self.positions = positions
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return len(self.order) - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        order = self.order.permutation(epoch)
        if self.positions is not None:
            order = self.positions[order]
        for step in range(self.start, len(self.order)):
            chosen = order[self.order.batch(step)][self.order.part(step)]
            yield [(epoch, index) for index in chosen.tolist()]


def _leave_interrupts_to_the_parent(worker: int) -> None:
    """Ignore Ctrl-C in workers: it reaches every process, but workers must outlast the training.

    Otherwise they would inherit the parent's signal handlers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
