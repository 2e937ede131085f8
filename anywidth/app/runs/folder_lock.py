"""A lock for one writer per folder; it ends with the process, even after a kill."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from anywidth.errors import AnywidthError


class FolderLock:
    """Locks a folder while this object exists; see `lock_folder`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


_held: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()


def lock_folder(folder: Path, *, wait: bool = False) -> FolderLock | None:
    """Lock a folder for this process; raises if another process has it.

    All callers in a process share the lock. With `wait`, it waits for the other process instead.
    Returns None if the system or disk has no locks.
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
            f"{folder}: another process is writing to this run; wait until it ends, or stop it "
            "with Ctrl-C, which saves a checkpoint"
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    lock = _held[place] = FolderLock(descriptor)
    return lock


def _let_go() -> None:
    """A loader's worker may outlive the training that forked it by a moment."""
    for lock in list(_held.values()):
        os.close(lock._descriptor)
        lock._descriptor = os.open(os.devnull, os.O_RDONLY)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
