"""One writer to a folder: a lock that ends with the process, however that ends."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from anywidth.errors import AnywidthError


class FolderLock:
    """Holds a folder while it exists; see `lock_folder`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


_held: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()


def lock_folder(folder: Path, *, wait: bool = False) -> FolderLock | None:
    """Claims a folder for this process, or says that another one has it.

    Within a process all callers share the lock. None where the system or the disk has no locks.

    Args:
        folder: to claim.
        wait: until the other process lets go of it, rather than raise an error.
    """
    if os.name != "posix":
        return None
    import fcntl

    place = folder.resolve()
    lock = _held.get(place)
    if lock is not None:
        return lock
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise AnywidthError(
            f"{folder}: another process is training this run; wait until it has ended, or stop it "
            "with Ctrl-C, which saves what it has done"
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    lock = _held[place] = FolderLock(descriptor)
    return lock


def _let_go() -> None:
    """A loader's worker may live a little longer than the training that forked it."""
    for lock in list(_held.values()):
        os.close(lock._descriptor)
        lock._descriptor = os.open(os.devnull, os.O_RDONLY)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
