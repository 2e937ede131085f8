"""The images of a folder with one subfolder per class: list, decode, transform, collate."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from anywidth.errors import AnywidthError
from anywidth.seeds import derive_seed

try:
    from torchvision import transforms
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import pil_loader
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

    def path(self, index: int) -> Path:
        start = int(self._ends[index - 1]) if index else 0
        name = self._names[start : int(self._ends[index])].numpy().tobytes()
        return self.folder / os.fsdecode(name)


def scan_folder(folder: Path) -> ImageFiles:
    """List the images below ``folder``; its subfolders are the classes."""
    try:
        found = ImageFolder(str(folder))
    except FileNotFoundError as error:
        raise AnywidthError(
            f"{folder} has a class without images: {error}; expected one folder per class, each "
            "with at least one image"
        ) from error
    return ImageFiles(folder, found.samples, found.classes)


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
            image = pil_loader(str(path))
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
        return transforms.Compose([transforms.Resize(resize), transforms.CenterCrop(size)])
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
