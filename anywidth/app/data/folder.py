"""Batches from a folder of image files in ImageNet's layout, decoded by workers or a GPU."""

import logging
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from anywidth.app.data import decoding_on_gpu, decoding_workers
from anywidth.app.data.augment import normalize
from anywidth.app.data.decoding_on_gpu.jpeg_batches import PARTS_AT_ONCE, JpegBatches
from anywidth.app.data.decoding_on_gpu.jpeg_files import FolderJpegs, room_for_files
from anywidth.app.data.decoding_on_gpu.read_ahead import ReadAhead
from anywidth.app.data.folder_augment import COLOURS, augment, colour_changes
from anywidth.app.data.folder_images import (
    Decoded,
    FolderImages,
    Gathered,
    Request,
    Slots,
    images_per_part,
)
from anywidth.app.data.image_files import ImageFiles
from anywidth.app.data.order import BatchOrder, ImageLoader
from anywidth.errors import AnywidthError, few_of

logger = logging.getLogger(__name__)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_PARTS_AHEAD = 3
"""How many parts of batches each worker may have in work or ready."""
_BATCHES_AHEAD = 2
"""How many batches decoded on a GPU may be ready."""


class FolderLoader(ImageLoader):
    """Yield normalised (images, labels) batches of image files.

    Workers decode, crop and resize; colours and mirroring follow on ``device``, per batch. If
    `decoding_on_gpu` is switched on and possible, the device decodes training images too. The
    order is drawn from (seed, epoch), and the augmentation of an image from (seed, epoch, index),
    so that ranks, workers and a resumed epoch agree. Batches are split as in DeviceLoader.

    A file that does not decode stops the epoch with an error that names it. With ``skip_corrupt``
    it is skipped and its batch is shorter; ``corrupt`` then maps these files to the reasons, and a
    log line names them at the end of the first epoch that skips them. If no image of a part
    decodes, the part is empty, or with ``drop_last``, as in training, an error is raised.

    Worker processes are kept between epochs and serve one epoch at a time: starting another epoch
    ends the current one.
    """

    def __init__(
        self,
        files: ImageFiles,
        *,
        size: int = 224,
        resize: int = 256,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        workers: int = 4,
        skip_corrupt: bool = False,
        **options: Any,
    ) -> None:
        """A FolderAugmentation replaces resize and crop; other options are those of ImageLoader."""
        if not 1 <= size <= resize:
            raise AnywidthError(
                f"size={size}, resize={resize}: expected 1 <= size <= resize: a square of size "
                "is cut from an image whose shorter side is resize"
            )
        self.files = files
        self.size, self.resize = size, resize
        self.workers = workers
        self.skip_corrupt = skip_corrupt
        super().__init__(len(files), mean, std, **options)

    def _prepare(self) -> None:
        self.corrupt: dict[str, str] = {}
        self._named: set[str] = set()
        self._on_cuda = self.device.type == "cuda"
        self._copies = torch.cuda.Stream(self.device) if self._on_cuda else None
        # Only training shuffles; calibration may augment too.
        is_training = self.augmentation is not None and self.order.shuffle
        self._obstacle: str | None = "they are not trained on"
        if is_training:
            self._obstacle = decoding_on_gpu.obstacle(self.device)
        self._file_bytes, held = 0, 1
        if self._obstacle is None:
            self._file_bytes, held = room_for_files(self.files), PARTS_AT_ONCE
        self._requests = _Requests(
            self.order,
            self.positions,
            images_per_part(self.size, self._file_bytes),
            _PARTS_AHEAD * self.workers + held,
        )
        self.__dict__.pop("_decoding", None)  # of the loader that this is a subset of
        self._epoch_under_way = object()
        self._ahead: ReadAhead[Gathered] | None = None

    @cached_property
    def _decoding(self) -> tuple[DataLoader[Decoded], Slots, JpegBatches]:
        """The workers, the memory they share, and what a GPU does with it; made when first needed.

        None of them refers to this loader, so that they end with it at once.
        """
        slots = Slots(self._requests.slots, self.size, self.workers > 0, self._file_bytes)
        options = (slots, self.size, self.resize, self.augmentation, self.order.seed)
        images = FolderImages(self.files, *options)
        if self.augmentation is not None:
            way = f"by the CPU ({self._obstacle})" if self._obstacle else "by the GPU"
            logger.info("images of %s are decoded %s", self.files.folder, way)
        decoded: DataLoader[Decoded] = DataLoader(
            images if self._obstacle else FolderJpegs(self.files, *options),
            batch_size=None,  # a request is a part of a batch already
            sampler=self._requests,
            num_workers=self.workers,
            prefetch_factor=_PARTS_AHEAD if self.workers else None,
            persistent_workers=self.workers > 0,
            worker_init_fn=_leave_interrupts_to_the_parent,
            # Otherwise it would draw from the global generator at every epoch.
            generator=torch.Generator(),
        )
        return decoded, slots, JpegBatches(images, self.device, self.skip_corrupt)

    def paths(self) -> Iterator[Path]:
        """The files that this loader reads."""
        places = range(len(self.files)) if self.positions is None else self.positions.tolist()
        return (self.files.path(place) for place in places)

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        token = self._epoch_under_way = object()
        if self._ahead is not None and not self._ahead.end():
            raise AnywidthError(
                f"epoch {epoch} cannot start, because a worker process still decodes images of "
                "the epoch before: continue the run with --resume"
            )
        self._requests.epoch, self._requests.start = epoch, start
        skipped: list[str] = []
        steps = range(start, len(self))
        batches = (self._gathered if self._obstacle else self._gathered_ahead)(epoch, steps)
        for _ in steps:
            yield self._assemble(next(batches), skipped)
            if self._epoch_under_way is not token:
                raise AnywidthError(
                    f"epoch {epoch} was not finished when another epoch of the same loader "
                    "started: finish one before the next, or use two loaders"
                )
        new = [path for path in skipped if path not in self._named]
        self._named.update(new)
        if new:
            images = "1 corrupt image" if len(new) == 1 else f"{len(new)} corrupt images"
            logger.warning("skipped %s in epoch %d: %s", images, epoch, few_of(new))

    def _gathered(self, epoch: int, steps: range) -> Iterator[Gathered]:
        """The batches of an epoch as workers decode them."""
        decoded, slots, _ = self._decoding
        parts = decoding_workers.watched(decoded)
        for step in steps:
            yield self._gather(parts, self._requests.parts(step), slots)

    def _gathered_ahead(self, epoch: int, steps: range) -> Iterator[Gathered]:
        """The batches of an epoch as the GPU decodes them, in a thread of its own."""
        decoded, _, batches = self._decoding
        with decoding_workers.watching(decoded) as parts:
            ahead = self._ahead = ReadAhead[Gathered](_BATCHES_AHEAD)
            parts = ahead.until_ended(parts)
            sizes = map(self._requests.parts, steps)
            ahead.start(batches.gather(parts, of_step, epoch) for of_step in sizes)
            try:
                for _ in steps:
                    yield ahead.take()
            finally:
                ahead.end()

    def _gather(self, parts: Iterator[Decoded], sizes: Sequence[int], slots: Slots) -> Gathered:
        """One batch from the next parts, whose slots are free after this."""
        count, shape = sum(sizes), (self.size, self.size, 3)
        images = torch.empty((count, *shape), dtype=torch.uint8, pin_memory=self._on_cuda)
        colours = torch.empty((count, COLOURS))
        kept: list[int] = []
        corrupt: list[tuple[str, str]] = []
        for _ in sizes:
            part = next(parts)
            part.refuse_faults(self.skip_corrupt)
            corrupt.extend(part.corrupt)
            filled, start = len(part.indices), len(kept)
            images[start : start + filled] = slots.images[part.slot, :filled]
            colours[start : start + filled] = slots.colours[part.slot, :filled]
            kept.extend(part.indices)
        return Gathered(images[: len(kept)], colours[: len(kept)], kept, corrupt)

    def _assemble(self, gathered: Gathered, skipped: list[str]) -> tuple[Tensor, Tensor]:
        """The batch on the device."""
        paths = [path for path, _ in gathered.corrupt]
        self.corrupt.update(gathered.corrupt)
        skipped.extend(paths)
        if paths and not gathered.kept and self.order.drop_last:
            raise AnywidthError(
                f"a batch is empty because all {len(paths)} of its images are corrupt "
                f"({few_of(paths)}): replace or remove them"
            )
        if gathered.ready is not None:
            computation = torch.cuda.current_stream(self.device)
            computation.wait_event(gathered.ready)
            gathered.images.record_stream(computation)
        labels = self._to_device(self.files.labels[gathered.kept])
        return self._finished(gathered.images, gathered.colours), labels

    def _finished(self, images: Tensor, colours: Tensor) -> Tensor:
        """The batch as the network takes it, in torch operations on its device."""
        if images.device.type != self.device.type:
            images = self._to_device(images)
        if self.augmentation is None:
            planes = images.permute(0, 3, 1, 2).contiguous()
            return normalize(planes, self._mean, self._std)
        changes = self._to_device(colour_changes(colours, self.augmentation))
        levels = augment(images, changes, self.augmentation)
        return normalize(levels, 255 * self._mean, 255 * self._std)

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Copy on a separate stream, so that the next batch arrives while the GPU computes."""
        if self._copies is None:
            return tensor.to(self.device)
        computation = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            copied = tensor.pin_memory().to(self.device, non_blocking=True)
        computation.wait_stream(self._copies)
        copied.record_stream(computation)
        return copied


@dataclass(eq=False)
class _Requests(Sampler[Request]):
    """This rank's parts of each step's batch, for the current epoch and start.

    Slots take turns. There is one more than parts can be under way, so that the part that the
    loader holds is not overwritten.
    """

    order: BatchOrder
    positions: Tensor | None
    images: int
    slots: int
    epoch: int = 0
    start: int = 0

    def __len__(self) -> int:
        return sum(len(self.parts(step)) for step in range(self.start, len(self.order)))

    def parts(self, step: int) -> list[int]:
        """The sizes of the parts of a step."""
        own = self.order.part(step)
        count = own.stop - own.start
        return [min(self.images, count - start) for start in range(0, count, self.images)]

    def __iter__(self) -> Iterator[Request]:
        epoch, number = self.epoch, 0
        order = self.order.permutation(epoch)
        if self.positions is not None:
            order = self.positions[order]
        for step in range(self.start, len(self.order)):
            chosen = order[self.order.batch(step)][self.order.part(step)]
            for indices in chosen.split(self.images) if len(chosen) else ():
                yield Request(number % self.slots, epoch, indices.tolist())
                number += 1


def _leave_interrupts_to_the_parent(worker: int) -> None:
    """Ignore Ctrl-C in workers: it reaches every process, but workers must outlast the training.

    Otherwise they would inherit the parent's signal handlers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
