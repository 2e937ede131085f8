"""The image files below a folder with one subfolder per class."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from anywidth.errors import AnywidthError, few_of

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Endings of the files that are taken for images."""
# A copy of a folder has the same files; so many of them are compared by their sizes too.
_MOST_SIZES = 1000


class ImageFiles:
    """The image files below a folder, their labels and the class names.

    Paths are kept in one tensor, which worker processes share. A list of strings would be copied
    into each of them page by page as reference counts change.
    """

    def __init__(self, folder: Path, files: Sequence[tuple[str, int]], classes: Sequence[str]):
        encoded = [os.fsencode(os.path.relpath(path, folder)) for path, _ in files]
        self.folder = folder
        self.classes = tuple(classes)
        self.labels = torch.tensor([label for _, label in files], dtype=torch.int64)
        self._names = torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8)
        self._ends = torch.tensor([len(name) for name in encoded]).cumsum(0)

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """Differs if a file has another name, class or place; or another size, among many files."""
        whole = hashlib.blake2b(digest_size=12)
        for part in (self._names, self._ends, self.labels):
            whole.update(part.numpy().data)
        for index in range(0, len(self), -(-len(self) // _MOST_SIZES)):
            path = self.path(index)
            whole.update(f"{path.stat().st_size if path.exists() else None},".encode())
        return whole.hexdigest()

    def path(self, index: int) -> Path:
        start = int(self._ends[index - 1]) if index else 0
        name = self._names[start : int(self._ends[index])].numpy().tobytes()
        return self.folder / os.fsdecode(name)


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


def scan_folder(folder: Path) -> ImageFiles:
    """List the images below ``folder``; its subfolders are the classes."""
    try:
        classes = sorted(entry.name for entry in _entries(folder) if entry.is_dir())
        above = frozenset(map(str, (folder.resolve(), *folder.resolve().parents)))
        # Sorted by folder, then by name: the order of training must not change.
        found = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted(_images(os.path.join(folder, name), above), key=os.path.split)
        ]
    except OSError as error:
        raise AnywidthError(
            f"{error.filename} cannot be listed ({error.strerror or error}): check its permissions"
        ) from error
    if not classes:
        raise AnywidthError(f"{folder} has no subfolders: expected one folder per class")
    empty = sorted(set(classes) - {classes[label] for _, label in found})
    if empty:
        raise AnywidthError(
            f"{folder} has a class without images: {few_of(empty)}; expected one folder per class, "
            f"each with at least one image that ends in {', '.join(SUFFIXES)}"
        )
    return ImageFiles(folder, found, classes)


def _images(folder: str, above: frozenset[str]) -> Iterator[str]:
    """The image files below a folder; `above` are the real paths of the folders that it is in."""
    real = os.path.realpath(folder)
    if real in above:
        raise AnywidthError(
            f"{folder} is a link to {real}, a folder that it is in, so its images would be found "
            "again and again; remove the link"
        )
    for entry in _entries(folder):
        if entry.is_dir():
            yield from _images(entry.path, above | {real})
        elif entry.name.lower().endswith(SUFFIXES):
            yield entry.path


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
