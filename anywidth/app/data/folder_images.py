"""The images of a folder with one subfolder per class: list, decode, transform, collate."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from anywidth.app.data.image_reading import central_square, decode
from anywidth.errors import AnywidthError, few_of
from anywidth.training.seeds import derive_seed

try:
    from torchvision import transforms
    from torchvision.datasets.folder import IMG_EXTENSIONS
    from torchvision.transforms.functional import pil_to_tensor, to_pil_image
except ModuleNotFoundError as error:
    raise AnywidthError(
        f"folders of images need the package {error.name!r}: install it with "
        "pip install 'anywidth[cli]'"
    ) from error


# Principal components of ImageNet's colours, values in 0..1: AlexNet's, section 4.1 of its paper.
_EIGENVALUES = (0.2175, 0.0188, 0.0045)
_EIGENVECTORS = (  # one per column
    (-0.5675, 0.7192, 0.4009),
    (-0.5808, -0.0045, -0.8140),
    (-0.5836, -0.6948, 0.4203),
)


@dataclass(frozen=True)
class FolderAugmentation:
    """The mobile augmentation of the paper's ImageNet recipe.

    A crop with ``min_area`` to all of the image's area is resized; brightness, contrast and
    saturation are scaled by factors within 1 +- ``jitter``; half of the images are mirrored.

    ``lighting`` is the deviation of AlexNet's colour noise, which adds a random multiple of each
    principal component of ImageNet's colours. It is off by default: the authors' code uses 0.1,
    but adds noise for values up to 1 to values up to 255, which changes at most one of 255 levels.
    """

    min_area: float = 0.25
    jitter: float = 0.4
    flip: bool = True
    lighting: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.min_area <= 1 or self.jitter < 0 or self.lighting < 0:
            raise AnywidthError(
                f"FolderAugmentation(min_area={self.min_area}, jitter={self.jitter}, "
                f"lighting={self.lighting}): expected 0 < min_area <= 1, jitter >= 0 and "
                "lighting >= 0"
            )


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
            f"each with at least one image that ends in {', '.join(IMG_EXTENSIONS)}"
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
        elif entry.name.lower().endswith(IMG_EXTENSIONS):
            yield entry.path


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


class FolderBatch(NamedTuple):
    """Decoded images (uint8), their labels, and (path, reason) of each file without an image.

    Faults are returned as data, because an exception in a worker process would bury its message.
    A file is corrupt if it does not decode, and unreadable if the system cannot read it.
    """

    images: Tensor
    labels: Tensor
    corrupt: list[tuple[str, str]]
    unreadable: list[tuple[str, str]]


class Decoded(NamedTuple):
    """One decoded image, or the path and the reason of the fault."""

    image: Tensor | None
    label: int
    path: str = ""
    reason: str = ""
    readable: bool = True


class FolderImages(Dataset[Decoded]):
    """Decode and transform the image at (epoch, index), with randomness from (seed, both).

    Without augmentation the shorter side becomes ``resize`` and the central square of ``size``
    pixels is cut out.
    """

    def __init__(
        self,
        files: ImageFiles,
        *,
        size: int,
        resize: int,
        augmentation: FolderAugmentation | None,
        seed: int,
    ) -> None:
        self.files = files
        self.size = size
        self.seed = seed
        self.transform = _transform(size, resize, augmentation)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: tuple[int, int]) -> Decoded:
        epoch, index = key
        label = int(self.files.labels[index])
        path = self.files.path(index)
        try:
            image = decode(path, "RGB")
        except Exception as error:  # Pillow's decoders raise many kinds of errors.
            # Only the operating system sets an error number.
            readable = not (isinstance(error, OSError) and error.errno is not None)
            return Decoded(None, label, str(path), f"{type(error).__name__}: {error}", readable)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed("image", self.seed, epoch, index))
            return Decoded(pil_to_tensor(self.transform(image)), label)

    def collate(self, samples: list[Decoded]) -> FolderBatch:
        """Stack the images that could be decoded and list the files that could not."""
        images = [sample.image for sample in samples if sample.image is not None]
        faults = [sample for sample in samples if sample.image is None]
        nothing = torch.empty((0, 3, self.size, self.size), dtype=torch.uint8)
        labels = [sample.label for sample in samples if sample.image is not None]
        return FolderBatch(
            torch.stack(images) if images else nothing,
            torch.tensor(labels, dtype=torch.int64),
            corrupt=[(fault.path, fault.reason) for fault in faults if fault.readable],
            unreadable=[(fault.path, fault.reason) for fault in faults if not fault.readable],
        )


def _transform(size: int, resize: int, augmentation: FolderAugmentation | None) -> Any:
    if augmentation is None:
        return partial(central_square, size=size, resize=resize)
    jitter = augmentation.jitter
    parts: list[Any] = [
        transforms.RandomResizedCrop(size, scale=(augmentation.min_area, 1.0)),
        transforms.ColorJitter(brightness=jitter, contrast=jitter, saturation=jitter),
    ]
    if augmentation.lighting:
        parts.append(_Lighting(augmentation.lighting))
    if augmentation.flip:
        parts.append(transforms.RandomHorizontalFlip())
    return transforms.Compose(parts)


@dataclass(frozen=True)
class _Lighting:
    deviation: float

    def __call__(self, image: Any) -> Any:
        return to_pil_image(add_lighting(pil_to_tensor(image), self.deviation * torch.randn(3)))


def add_lighting(image: Tensor, weights: Tensor) -> Tensor:
    """Add multiples of the principal components of ImageNet's colours to a uint8 RGB image."""
    shift = torch.tensor(_EIGENVECTORS) @ (weights * torch.tensor(_EIGENVALUES))
    return (image + 255 * shift[:, None, None]).round().clamp(0, 255).to(torch.uint8)
