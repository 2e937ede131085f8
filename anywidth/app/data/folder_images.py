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

FIELDS = 7
"""The numbers of a header: the bytes of the file (0: the row has an image), its width and height in
pixels, and its crop: left, top, width and height."""


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

    def refuse_faults(self, skip_corrupt: bool) -> None:
        """Raise an error that names the first file that cannot be read, or skipped."""
        if self.unreadable:
            path, reason = self.unreadable[0]
            raise AnywidthError(
                f"{path} cannot be read ({reason}), but it existed when the loader was made: check "
                "the disk and the file's permissions"
            )
        if self.corrupt and not skip_corrupt:
            path, reason = self.corrupt[0]
            raise AnywidthError(
                f"{path} is not a whole image ({reason}): replace or remove it, or skip such "
                "files with --skip-corrupt"
            )


class Gathered(NamedTuple):
    """A batch before colours and mirroring: images, numbers, indices, faults of the others.

    Images on a GPU are there once `ready` has happened.
    """

    images: Tensor
    colours: Tensor
    kept: list[int]
    corrupt: list[tuple[str, str]]
    ready: torch.cuda.Event | None = None


class Slots:
    """Memory for parts of batches, each filled by one worker and emptied before it is used again.

    Images are sent without a copy, and memory is bounded, whatever the batch size. With
    ``file_bytes``, a row has room for a file of that size in place of an image, and for the header
    that says so (see `FolderJpegs`).
    """

    def __init__(self, count: int, size: int, is_shared: bool, file_bytes: int = 0) -> None:
        rows, pixels = images_per_part(size, file_bytes), 3 * size * size
        self.memory = torch.empty((count, rows, max(pixels, file_bytes)), dtype=torch.uint8)
        self.colours = torch.empty((count, rows, COLOURS))
        self.headers = torch.zeros((count, rows, FIELDS), dtype=torch.int64)
        if is_shared:
            try:
                for part in (self.memory, self.colours, self.headers):
                    part.share_memory_()
            except RuntimeError as error:
                raise AnywidthError(
                    f"{self.memory.numel() / 1e6:,.0f} MB of shared memory for decoded images "
                    f"cannot be had ({str(error).splitlines()[0]}): give fewer --workers, or make "
                    "/dev/shm larger (docker run --shm-size)"
                ) from error
        self.images = self.memory[..., :pixels].view(count, rows, size, size, 3)


def images_per_part(size: int, file_bytes: int = 0) -> int:
    """How many images of `size` pixels, or files of so many bytes, a worker takes at a time."""
    return max(1, min(_MOST_IMAGES, _MOST_BYTES // max(3 * size * size, file_bytes)))


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
        done = Decoded(request.slot, [], [], [])
        for index in request.indices:
            self.decode(index, request.epoch, (request.slot, len(done.indices)), done)
        return done

    def decode(self, index: int, epoch: int, row: tuple[int, int], done: Decoded) -> None:
        """Fill a row of a slot, and note the image, or what is wrong with its file."""
        path = self.files.path(index)
        try:
            self._fill(path, (epoch, index), row)
        except Exception as error:  # Pillow's decoders raise many kinds of errors.
            # Only the operating system sets an error number.
            is_readable = not (isinstance(error, OSError) and error.errno is not None)
            faults = done.corrupt if is_readable else done.unreadable
            faults.append((str(path), f"{type(error).__name__}: {error}"))
        else:
            done.indices.append(index)

    def _fill(self, path: Path, place: tuple[int, int], row: tuple[int, int]) -> None:
        image, colours = self.slots.images[row], self.slots.colours[row]
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
