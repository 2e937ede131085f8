"""A check of all image files before the first epoch, so that a damaged one costs no training."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from anywidth.app.data.image_reading import decode, read_size
from anywidth.errors import AnywidthError
from anywidth.files import write_atomically
from anywidth.measuring.progress import training_progress

if TYPE_CHECKING:
    from anywidth.app.data.folder import FolderLoader

logger = logging.getLogger(__name__)
Found = TypeVar("Found")

DECODING_SECONDS = 15.0
"""Enough for tens of thousands of small pictures."""
# The first and the last bytes of a complete file; a file with another end is decoded.
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89PNG": b"IEND\xaeB`\x82"}
_TAIL = 64
_CHUNK = 64
_MOST_NAMED = 20
_VERSION = b"2"


def check_images(
    loaders: Iterable[FolderLoader], *, skip_corrupt: bool = False, remember: bool = True
) -> None:
    """Check that every file that the loaders read is a whole image; name all that are not.

    For some seconds, files are decoded. Those left must open as an image and end as their format
    does, so that the check of a large set takes a fraction of an epoch; damage in the middle of
    these is found when training reads them. Files that passed are remembered by their sizes and
    times, if `remember`, in the user's cache folder: the next check only compares these. With
    `skip_corrupt`, damaged files are named in a warning, not in an error.
    """
    paths = sorted({path for loader in loaders for path in loader.paths()})
    if not paths:
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    passed = cache / "anywidth" / "checked" / _fingerprint(paths)
    if passed.exists():
        return
    check = partial(_faults, deadline=monotonic() + DECODING_SECONDS)
    faults = sorted(chain.from_iterable(_in_chunks(paths, check, "checking images")))
    if faults:
        named = [f"{path} ({reason})" for path, reason in faults[:_MOST_NAMED]]
        more = f", and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
        text = f"{len(faults)} of {len(paths):,} image files are damaged: {', '.join(named)}{more}"
        if not skip_corrupt:
            raise AnywidthError(f"{text}; replace or remove them, or skip them with --skip-corrupt")
        logger.warning("%s; they are skipped", text)
    elif remember:
        try:
            passed.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(passed, b"")
        except (OSError, AnywidthError):
            pass  # the next check takes as long as this one


def _faults(paths: Sequence[Path], deadline: float) -> list[tuple[str, str]]:
    """The files that are not complete images, and the reasons; until `deadline` all are decoded."""
    found = []
    for path in paths:
        try:
            read_size(path)
            if monotonic() < deadline or not _is_whole(path):
                decode(path, "RGB")
        except Exception as error:  # decoders raise many kinds of errors
            found.append((str(path), str(error.__cause__ or error)))
    return found


def _is_whole(path: Path) -> bool:
    with open(path, "rb") as file:
        begin = file.read(4)
        end = next((end for start, end in _ENDS.items() if begin.startswith(start)), None)
        if end is None:
            return False
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        return end in file.read()


def _fingerprint(paths: Sequence[Path]) -> str:
    """Changes if a file is added, removed, replaced or written to."""
    whole = hashlib.sha256(_VERSION)
    for digest in sorted(_in_chunks(paths, _digest, "comparing image files")):
        whole.update(digest)
    return whole.hexdigest()


def _digest(paths: Sequence[Path]) -> bytes:
    digest = hashlib.sha256()
    for path in paths:
        try:
            stat = path.stat()
            known = f"{stat.st_size} {stat.st_mtime_ns}"
        except OSError:
            known = "unreadable"
        digest.update(f"{path}\0{known}\0".encode(errors="surrogateescape"))
    return digest.digest()


def _in_chunks(
    paths: Sequence[Path], work: Callable[[Sequence[Path]], Found], description: str
) -> list[Found]:
    """The results of all chunks; threads wait for the disk together."""
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    results = []
    with (
        ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool,
        training_progress(len(paths), description=description) as progress,
    ):
        waiting = {pool.submit(work, chunk): len(chunk) for chunk in chunks}
        try:
            for done in as_completed(waiting):
                results.append(done.result())
                progress.update(progress.step + waiting[done])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results
