"""Pictures for super-resolution: a folder becomes pairs of small and large images in memory.

Low resolution comes with DIV2K, or is made here from the large image (`resize.py`).
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from anywidth.app.data.image_reading import read_image, read_size
from anywidth.app.tasks.super_resolution.image_quality import WINDOW
from anywidth.app.tasks.super_resolution.resize import crop_to_multiple, downscale
from anywidth.app.tasks.super_resolution.settings import SuperResolutionSettings
from anywidth.errors import AnywidthError, few_of
from anywidth.files import write_atomically

logger = logging.getLogger(__name__)

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
SPLITS = ("train", "valid")
BUNDLED = Path(__file__).parent / "bundled_pictures"
"""Pictures in the package (public domain): 12 in `train`, 4 in `eval`."""
MEMORY_LIMIT = 2 * 1024**3
DECODED_AHEAD = 16

Size = tuple[int, int]  # height, width


@dataclass(frozen=True, eq=False)
class Pictures:
    """RGB pictures of any sizes, one after the other in one buffer."""

    pixels: Tensor
    """uint8 of shape (pixels of all pictures, 3)."""
    sizes: tuple[Size, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first position of each picture in `pixels`."""
        return tuple(accumulate((h * w for h, w in self.sizes[:-1]), initial=0))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Tensor:
        """One picture, uint8 of shape (3, height, width); a view, not a copy."""
        (height, width), offset = self.sizes[index], self.offsets[index]
        return self.pixels[offset : offset + height * width].view(height, width, 3).permute(2, 0, 1)

    def part(self, first: int, last: int) -> Pictures:
        """Neighbouring pictures, as a view."""
        sizes = self.sizes[first:last]
        start = self.offsets[first]
        return Pictures(self.pixels[start : start + sum(h * w for h, w in sizes)], sizes)


@dataclass(frozen=True, eq=False)
class PicturePairs:
    """The same pictures at low and at `scale` times as high resolution."""

    names: tuple[str, ...]
    low: Pictures
    high: Pictures
    scale: int

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Low and high resolution of one picture, uint8 of shape (3, height, width)."""
        return self.low[index], self.high[index]

    def facts(self) -> dict[str, object]:
        """How a run recognises the pictures that it was trained with."""
        known = repr((self.names, self.high.sizes)).encode(errors="surrogateescape")
        return {
            "training pictures": len(self),
            "pixels": len(self.high.pixels),
            "digest of names and sizes": blake2b(known, digest_size=12).hexdigest(),
        }

    def part(self, first: int, last: int) -> PicturePairs:
        """The pictures from `first` up to, without, `last`; pixels are not copied."""
        low, high = (one.part(first, last) for one in (self.low, self.high))
        return PicturePairs(self.names[first:last], low, high, self.scale)


@dataclass(frozen=True)
class _Source:
    """A picture to decode, and its size after cutting to a multiple of the scale."""

    name: str
    high: Path
    low: Path | None
    size: Size


def load_pairs(
    folder: str | Path,
    scale: int = 2,
    *,
    split: str = "train",
    patch: int = 1,
    memory_limit: int = MEMORY_LIMIT,
    cache: str | Path | None = None,
    subfolders: bool = True,
) -> PicturePairs:
    """Decode all pictures of a folder, sorted by name, and pair each with its low resolution.

    A folder with `DIV2K_train_HR` or `DIV2K_valid_HR` is read as DIV2K: `split` selects one, and
    low resolution comes from `DIV2K_<split>_LR_bicubic/X<scale>` if that exists. Any other folder
    is searched for images with all its subfolders. Without low-resolution files, each picture is
    cut to a multiple of `scale`, shrunk by MATLAB's bicubic and rounded to 8 bit.

    Args:
        patch: pictures whose low resolution is smaller than this are skipped; the log names them.
        memory_limit: above this number of bytes, pixels are in a memory-mapped file.
        cache: folder for that file, where later runs find it; by default a temporary one.
        subfolders: whether pictures in subfolders (also DIV2K's) are included.
    """
    folder = Path(folder)
    if split not in SPLITS:
        raise AnywidthError(f"split={split!r}: expected 'train' or 'valid'.")
    if not isinstance(scale, int) or scale < 1:
        raise AnywidthError(f"scale={scale!r}: expected a whole number of at least 1, such as 2.")
    if subfolders:
        pairs = _find_pairs(folder, scale, split)
    else:
        pairs = [(path, None) for path in find_images(folder) if path.parent == folder]
    sources = [_measure(folder, *paths, scale) for paths in pairs]
    sources = _drop_small(sources, folder, scale, patch)
    high_sizes = tuple(source.size for source in sources)
    low_sizes = tuple((height // scale, width // scale) for height, width in high_sizes)
    total = 3 * sum(height * width for height, width in (*high_sizes, *low_sizes))
    with ExitStack() as stack:
        high_file = low_file = None
        if total > memory_limit:
            if cache is None:
                # Removed from the folder here; the space is freed together with the pixels.
                cache = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="anywidth-", ignore_cleanup_errors=True)
                )
            Path(cache).mkdir(parents=True, exist_ok=True)
            identity = _identity(sources, scale)
            high_file = Path(cache) / f"{identity}-high.rgb"
            low_file = Path(cache) / f"{identity}-x{scale}.rgb"
        large = (crop_to_multiple(image, scale) for image in _decode(s.high for s in sources))
        high = _store(large, high_sizes, high_file)
        low_paths = [source.low for source in sources if source.low is not None]
        small = _decode(low_paths) if low_paths else _shrink(high, scale)
        low = _store(small, low_sizes, low_file)
    return PicturePairs(tuple(source.name for source in sources), low, high, scale)


def find_images(folder: str | Path) -> list[Path]:
    """All images in a folder and its subfolders, sorted, without hidden files."""
    folder = Path(folder)
    if not folder.is_dir():
        raise AnywidthError(f"{folder} is not a folder: give a folder of images.")
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )
    if not paths:
        raise AnywidthError(
            f"{folder} has no images: expected files that end in {', '.join(SUFFIXES)}."
        )
    return paths


def read_picture(path: str | Path) -> Tensor:
    """Decode one image file to uint8 RGB of shape (3, height, width), rotated by its EXIF data.

    Grey becomes RGB, transparent parts become white, and 16 bits are reduced to 8.
    """
    pixels = np.array(read_image(Path(path), "RGB", background="white"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _find_pairs(folder: Path, scale: int, split: str) -> list[tuple[Path, Path | None]]:
    """Every high-resolution file with its low-resolution file, if there are any."""
    if not any((folder / f"DIV2K_{other}_HR").is_dir() for other in SPLITS):
        return [(path, None) for path in find_images(folder)]
    high = find_images(folder / f"DIV2K_{split}_HR")
    low_folder = folder / f"DIV2K_{split}_LR_bicubic" / f"X{scale}"
    if not low_folder.is_dir():
        return [(path, None) for path in high]
    low = {path.stem: path for path in find_images(low_folder)}
    expected = {f"{path.stem}x{scale}": path for path in high}
    without_low = sorted(expected.keys() - low.keys())
    without_high = sorted(low.keys() - expected.keys())
    if without_low or without_high:
        raise AnywidthError(
            f"{high[0].parent} and {low_folder} do not match: {few_of(without_low) or 'none'} "
            f"missing in the low resolution, {few_of(without_high) or 'none'} without high "
            f"resolution. Complete the folders, or remove {low_folder} to make the low resolution "
            "from the large images."
        )
    return [(path, low[stem]) for stem, path in expected.items()]


def _measure(folder: Path, high: Path, low: Path | None, scale: int) -> _Source:
    height, width = read_size(high)
    small = (height // scale, width // scale)
    if low is not None and read_size(low) != small:
        raise AnywidthError(
            f"{low} is {'x'.join(map(str, read_size(low)))}, expected {small[0]}x{small[1]}: "
            f"1/{scale} of {high}, which is {height}x{width}. Put the matching files there."
        )
    name = high.relative_to(folder).with_suffix("").as_posix()
    return _Source(name, high, low, (small[0] * scale, small[1] * scale))


def _drop_small(sources: list[_Source], folder: Path, scale: int, patch: int) -> list[_Source]:
    side = scale * max(patch, 1)
    small = [source.name for source in sources if min(source.size) < side]
    if len(small) == len(sources):
        raise AnywidthError(
            f"{folder}: all {len(small)} images are smaller than {side}x{side}, one patch of "
            f"{max(patch, 1)} at scale {scale}. Add larger images, or train on smaller patches."
        )
    if small:
        logger.warning(
            "%s: skipped %d of %d images, smaller than %dx%d: %s",
            *(folder, len(small), len(sources), side, side, few_of(small)),
        )
    return [source for source in sources if min(source.size) >= side]


def _identity(sources: list[_Source], scale: int) -> str:
    """A name for the decoded pixels that changes with any of their files."""
    paths = [path for source in sources for path in (source.high, source.low) if path is not None]
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return blake2b(repr((scale, states)).encode(), digest_size=12).hexdigest()


def _decode(paths: Iterable[Path]) -> Iterator[Tensor]:
    """Decode in threads, a few pictures ahead."""
    pending = list(paths)
    with ThreadPoolExecutor(min(DECODED_AHEAD, os.cpu_count() or 1)) as pool:
        for first in range(0, len(pending), DECODED_AHEAD):
            yield from pool.map(read_picture, pending[first : first + DECODED_AHEAD])


def _shrink(pictures: Pictures, scale: int) -> Iterator[Tensor]:
    for index in range(len(pictures)):
        yield downscale(pictures[index][None], scale)[0]


def _store(images: Iterable[Tensor], sizes: tuple[Size, ...], file: Path | None) -> Pictures:
    """Store (3, height, width) images one after the other, in memory or in a mapped file."""
    total = 3 * sum(height * width for height, width in sizes)
    rows = (image.permute(1, 2, 0).reshape(-1) for image in images)
    if file is None:
        pixels, filled = torch.empty(total, dtype=torch.uint8), 0
        for row in rows:
            pixels[filled : filled + len(row)] = row
            filled += len(row)
    else:

        def write(stream: BinaryIO) -> None:
            for row in rows:
                stream.write(row.numpy().data)

        if not file.is_file() or file.stat().st_size != total:
            write_atomically(file, write)
        pixels = torch.from_file(str(file), shared=False, size=total, dtype=torch.uint8)
    return Pictures(pixels.view(-1, 3), sizes)


# ---- the pictures of a run -----------------------------------------------------------------------


def split_pictures(settings: SuperResolutionSettings) -> tuple[PicturePairs, PicturePairs | None]:
    """The pictures to train with, and those that a search judges by, if any are held out."""
    folder = BUNDLED / "train"
    if settings.data_dir is not None:
        folder = _folder(settings.data_dir, "--data-dir")
    pairs = load_pairs(folder, settings.scale, patch=settings.patch, cache=settings.cache_dir)
    if settings.held_out == 0:
        return pairs, None
    kept = len(pairs) - max(1, round(settings.held_out * len(pairs)))
    if kept < 1:
        raise AnywidthError(
            f"{settings.given('held_out')}: the {len(pairs)} pictures of {folder} leave none to "
            "train with; hold out fewer"
        )
    return pairs.part(0, kept), pairs.part(kept, len(pairs))


def load_evaluation_sets(settings: SuperResolutionSettings) -> dict[str, PicturePairs]:
    """The evaluation pictures by set, the smallest set first."""
    # After the border is cut, the window of SSIM must fit.
    smallest = math.ceil((WINDOW + 2 * settings.scale) / settings.scale)
    sets = {
        name: load_pairs(
            folder,
            settings.scale,
            split="valid",
            patch=smallest,
            cache=settings.cache_dir,
            subfolders=subfolders,
        )
        for name, (folder, subfolders) in _evaluation_folders(settings).items()
    }
    return dict(sorted(sets.items(), key=lambda item: (len(item[1]), item[0])))


def _evaluation_folders(settings: SuperResolutionSettings) -> dict[str, tuple[Path, bool]]:
    """The folder of each set, and whether its subfolders belong to it.

    The sets are the subfolders of `eval_dir`, and the pictures beside them as one more set; or
    DIV2K's validation pictures; or the bundled ones.
    """
    given = settings.eval_dir or settings.data_dir
    if given is not None and (Path(given) / "DIV2K_valid_HR").is_dir():
        return {"DIV2K": (Path(given), True)}
    if settings.eval_dir is None:
        return {"bundled": (BUNDLED / "eval", True)}
    folder = _folder(settings.eval_dir, "--eval-dir")
    paths = find_images(folder)
    inside = {path.relative_to(folder).parts[0] for path in paths if path.parent != folder}
    found = {name: (folder / name, True) for name in inside if not name.startswith(".")}
    own = folder.resolve().name
    if any(path.parent == folder for path in paths):
        found[f"{own} itself" if own in found else own] = (folder, False)
    return found or {own: (folder, True)}


def _folder(place: str, option: str) -> Path:
    if not Path(place).is_dir():
        raise AnywidthError(
            f"{place} is not a folder: give the folder of the pictures with {option} FOLDER"
        )
    return Path(place)
