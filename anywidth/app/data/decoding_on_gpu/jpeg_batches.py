"""What the training process does to decode on the GPU: from files in slots to a batch of crops."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from anywidth.app.data.folder_images import Decoded, FolderImages, Gathered

logger = logging.getLogger(__name__)

PARTS_AT_ONCE = 8
"""Parts of a batch whose slots are held while they are decoded: 256 photos of ImageNet."""
_MOST_PIXELS_AT_ONCE = 2**26
"""Decoded, they fill 200 MB of the GPU's memory."""


def decode_jpegs(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """Decode files to RGB, channels x height x width, on the device; it waits for the result."""
    from torchvision.io import ImageReadMode, decode_jpeg

    pictures: list[Tensor] = decode_jpeg(files, ImageReadMode.RGB, device)
    return [picture.contiguous() for picture in pictures]  # as they are on a GPU


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for decoding; None on a CPU, where everything is done in turn.

    Streams of high priority come from a pool of their own, so it is never one that captures graphs.
    """
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


class _Row(NamedTuple):
    """An image of a batch: its place there, its row of a slot, its number, its file's header."""

    place: int
    row: tuple[int, int]
    number: int
    header: list[int]

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        return 3, self.header[2], self.header[1]


class JpegBatches:
    """Make batches of crops from the parts that FolderJpegs returns.

    All work for the GPU is on a stream of its own, always the same, because PyTorch keeps memory
    for each stream. A file that nvJPEG refuses is decoded by `images`, which says what is wrong.
    """

    def __init__(self, images: FolderImages, device: torch.device, skip_corrupt: bool) -> None:
        self.images, self.device, self.skip_corrupt = images, device, skip_corrupt
        self._has_warned = False

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        return own_stream(self.device)

    def gather(self, parts: Iterator[Decoded], sizes: Sequence[int], epoch: int) -> Gathered:
        """One batch on the device, from the next parts, whose slots are free after this."""
        shape, slots = self.images.slots.images.shape[2:], self.images.slots
        colours = torch.empty((sum(sizes), slots.colours.shape[-1]))
        kept: list[int] = []
        corrupt: list[tuple[str, str]] = []
        lost: set[int] = set()
        with self._on_stream():
            images = torch.empty((sum(sizes), *shape), dtype=torch.uint8, device=self.device)
            for start in range(0, len(sizes), PARTS_AT_ONCE):
                rows: list[_Row] = []
                for _ in sizes[start : start + PARTS_AT_ONCE]:
                    part = next(parts)
                    part.refuse_faults(self.skip_corrupt)
                    corrupt.extend(part.corrupt)
                    begin, filled = len(kept), len(part.indices)
                    colours[begin : begin + filled] = slots.colours[part.slot, :filled]
                    rows.extend(self._rows(part, begin))
                    kept.extend(part.indices)
                faults = self._place(rows, images, epoch)
                corrupt.extend(fault for part in faults.values() for fault in part.corrupt)
                lost.update(faults)
            places = [place for place in range(len(kept)) if place not in lost]
            images = images[places if lost else slice(len(kept))]
            ready = None
            if self._stream is not None:
                ready = torch.cuda.Event()
                ready.record(self._stream)
        return Gathered(images, colours[places], [kept[place] for place in places], corrupt, ready)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _rows(self, part: Decoded, start: int) -> list[_Row]:
        headers = self.images.slots.headers[part.slot, : len(part.indices)].tolist()
        return [
            _Row(start + row, (part.slot, row), number, header)
            for row, (number, header) in enumerate(zip(part.indices, headers, strict=True))
        ]

    def _place(self, rows: list[_Row], images: Tensor, epoch: int) -> dict[int, Decoded]:
        """Put images into the batch; return the faults of those that are missing, by place."""
        faults: dict[int, Decoded] = {}
        by_cpu = [row for row in rows if not row.header[0]]
        refused: list[_Row] = []
        for portion in _portions(row for row in rows if row.header[0]):
            refused.extend(self._decode(portion, images))
        for row in refused:
            done = Decoded(row.row[0], [], [], [])
            self.images.decode(row.number, epoch, row.row, done)
            done.refuse_faults(self.skip_corrupt)
            if done.indices:
                by_cpu.append(row)
            else:
                faults[row.place] = done
        if by_cpu:
            pixels = torch.stack([self.images.slots.images[row.row] for row in by_cpu])
            places = torch.tensor([row.place for row in by_cpu])
            images.index_copy_(0, self._sent(places), self._sent(pixels))
        return faults

    def _decode(self, rows: list[_Row], images: Tensor) -> list[_Row]:
        """Decode files and put their crops into the batch; return those that the GPU refuses.

        They are found by halves, because the decoder does not say which it refuses. After an error
        it may still write to memory that is free by now. The next call, for a half, waits for that.
        """
        slots = self.images.slots
        files = [slots.memory[row.row][: row.header[0]] for row in rows]
        if self._stream is not None:
            # The decoder's stream does not wait for ours, but it writes to memory that torchvision
            # takes from ours, so whatever used that memory must be done.
            self._stream.synchronize()
        try:
            pictures = decode_jpegs(files, self.device)
            reason = "its size is not that of its header"
        except RuntimeError as error:
            pictures, reason = [], str(error).splitlines()[0]
        if [picture.shape for picture in pictures] == [row.picture_shape for row in rows]:
            self._crop(rows, pictures, images)
            return []
        if len(rows) == 1:
            self._warn(rows[0], reason)
            return rows
        half = len(rows) // 2
        return self._decode(rows[:half], images) + self._decode(rows[half:], images)

    def _warn(self, row: _Row, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            path = self.images.files.path(row.number)
            logger.warning(
                "%s is decoded on the CPU, because the GPU's decoder refuses it (%s); more such "
                "files are not named",
                path,
                reason,
            )

    def _crop(self, rows: list[_Row], pictures: list[Tensor], images: Tensor) -> None:
        """Launch the kernel; pictures may be freed then, as long as the stream is this one."""
        from anywidth.training.gpu.kernels.crop_resize import crop_and_resize

        table = [
            [picture.data_ptr(), row.place, *row.header[1:]]
            for row, picture in zip(rows, pictures, strict=True)
        ]
        crop_and_resize(self._sent(torch.tensor(table)), images)

    def _sent(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _portions(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """As many rows at a time as fit into memory when they are decoded."""
    portion: list[_Row] = []
    pixels = 0
    for row in rows:
        _, width, height, *_ = row.header
        if portion and pixels + width * height > _MOST_PIXELS_AT_ONCE:
            yield portion
            portion, pixels = [], 0
        portion.append(row)
        pixels += width * height
    if portion:
        yield portion
