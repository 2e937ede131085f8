"""Image files decoded into memory that worker processes share with the training process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from anywidth.app.data.folder_augment import COLOURS, FolderAugmentation, crop_box, draw
from anywidth.app.data.image_files import ImageFiles
from anywidth.app.data.image_reading import central_square, decode, decode_crop
from anywidth.errors import AnywidthError

_MOST_IMAGES = 32
_MOST_BYTES = 2**23


class Request(NamedTuple):
    """A part of a batch to decode: which images of which epoch, and the slot to put them into."""

    slot: int
    epoch: int
    indices: list[int]


class Decoded(NamedTuple):
    """What is in a slot: the images that could be decoded, and (path, reason) of all others.

    Faults are returned as data, because an exception in a worker process would bury its message.
    A file is corrupt if it does not decode, and unreadable if the system cannot read it.
    """

    slot: int
    indices: list[int]
    corrupt: list[tuple[str, str]]
    unreadable: list[tuple[str, str]]


class Slots:
    """Memory for parts of batches, each filled by one worker and emptied before it is used again.

    Images are sent without a copy, and memory is bounded, whatever the batch size.
    """

    def __init__(self, count: int, size: int, is_shared: bool) -> None:
        rows = images_per_part(size)
        self.images = torch.empty((count, rows, size, size, 3), dtype=torch.uint8)
        self.colours = torch.empty((count, rows, COLOURS))
        if is_shared:
            try:
                self.images.share_memory_()
                self.colours.share_memory_()
            except RuntimeError as error:
                raise AnywidthError(
                    f"{self.images.numel() / 1e6:,.0f} MB of shared memory for decoded images "
                    f"cannot be had ({str(error).splitlines()[0]}): give fewer --workers, or make "
                    "/dev/shm larger (docker run --shm-size)"
                ) from error


def images_per_part(size: int) -> int:
    """How many images of `size` pixels a worker decodes at a time."""
    return max(1, min(_MOST_IMAGES, _MOST_BYTES // (3 * size * size)))


@dataclass(eq=False)
class FolderImages(Dataset[Decoded]):
    """Decode the images of a request into its slot, with randomness from (seed, epoch, index).

    For training, a random crop is resized to ``size``, and the numbers for its colours are drawn.
    Without augmentation the shorter side becomes ``resize`` and the central square of ``size``
    pixels is cut out.
    """

    files: ImageFiles
    slots: Slots
    size: int
    resize: int
    augmentation: FolderAugmentation | None
    seed: int

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, request: Request) -> Decoded:
        images, colours = (part[request.slot] for part in (self.slots.images, self.slots.colours))
        done = Decoded(request.slot, [], [], [])
        for index in request.indices:
            path, row = self.files.path(index), len(done.indices)
            try:
                self._decode(path, (request.epoch, index), images[row], colours[row])
            except Exception as error:  # Pillow's decoders raise many kinds of errors.
                # Only the operating system sets an error number.
                is_readable = not (isinstance(error, OSError) and error.errno is not None)
                faults = done.corrupt if is_readable else done.unreadable
                faults.append((str(path), f"{type(error).__name__}: {error}"))
            else:
                done.indices.append(index)
        return done

    def _decode(self, path: Path, place: tuple[int, int], image: Tensor, colours: Tensor) -> None:
        if self.augmentation is None:
            square = central_square(decode(path, "RGB"), self.size, self.resize)
            image.copy_(torch.from_numpy(np.array(square)))  # tensors cannot be read-only
            return
        least_area, draws = self.augmentation.min_area, draw(self.seed, *place)
        crop = decode_crop(path, lambda w, h: crop_box(w, h, draws.crop, least_area), self.size)
        image.copy_(resized(torch.from_numpy(crop), self.size))
        colours.copy_(draws.colours)


def resized(pixels: Tensor, size: int) -> Tensor:
    """Resize to a square, height x width x channels; as Pillow's BILINEAR but faster.

    It rounds once more than Pillow does, so that some pixels differ by one level.
    """
    batch = pixels[None].permute(0, 3, 1, 2)
    square = F.interpolate(batch, (size, size), mode="bilinear", antialias=True)
    return square.permute(0, 2, 3, 1)[0]
