"""What worker processes do for a GPU that decodes: read JPEG files, and draw their crops."""

from __future__ import annotations

import stat
from pathlib import Path
from statistics import mean

from anywidth.app.data.folder_augment import crop_box, draw
from anywidth.app.data.folder_images import FolderImages
from anywidth.app.data.image_files import ImageFiles
from anywidth.app.data.image_reading import size_of_plain_jpeg

_MOST_PIXELS = 2**24
"""A larger picture, which would fill 50 MB of the GPU's memory, is decoded by its worker."""
_MOST_BYTES = 2**21
_MOST_SIZES = 256
_ROOM = 2
"""A row has room for files of so many times the mean size."""
_END = b"\xff\xd9"
_TAIL = 64


def room_for_files(files: ImageFiles) -> int:
    """The bytes that a file may have to be decoded on the GPU: most files of the folder fit."""
    sizes = []
    for index in range(0, len(files), -(-len(files) // _MOST_SIZES)):
        path = files.path(index)
        if path.is_file():
            sizes.append(path.stat().st_size)
    return min(_MOST_BYTES, int(_ROOM * mean(sizes)) + 1) if sizes else _MOST_BYTES


class FolderJpegs(FolderImages):
    """Put plain JPEG files as they are into the rows of a slot, and decode all others there.

    The draws are those of FolderImages, so a crop is the same part of the picture.
    """

    def _fill(self, path: Path, place: tuple[int, int], row: tuple[int, int]) -> None:
        if not self._read(path, place, row):
            self.slots.headers[row][0] = 0
            super()._fill(path, place, row)

    def _read(self, path: Path, place: tuple[int, int], row: tuple[int, int]) -> bool:
        """Read a file if the GPU is to decode it; no error, since decoding it here raises one."""
        assert self.augmentation is not None
        memory = self.slots.memory[row].numpy().data
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > len(memory):
                return False
            with open(path, "rb") as file:
                length = file.readinto(memory)
                file.seek(0)
                size = size_of_plain_jpeg(file)
        except OSError:
            return False
        # A file that ends too early might be decoded without an error.
        is_whole = _END in memory[max(0, length - _TAIL) : length].tobytes()
        if size is None or not is_whole or size[0] * size[1] > _MOST_PIXELS:
            return False
        draws = draw(self.seed, *place)
        left, top, right, bottom = crop_box(*size, draws.crop, self.augmentation.min_area)
        header = (length, *size, left, top, right - left, bottom - top)
        self.slots.headers[row].numpy()[:] = header
        self.slots.colours[row].copy_(draws.colours)
        return True
