"""Progress of long work, if rich is installed; none if not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def tracked_if_shown(items: Iterable[Item], description: str, shown: bool) -> Iterable[Item]:
    """`items`, with a bar that shows how far they have come."""
    if shown:
        with contextlib.suppress(ImportError):
            from anywidth.measuring.progress import tracked

            return tracked(items, description)
    return items


@contextlib.contextmanager
def progress_if_possible(
    description: str, total: int | None = None, *, shown: bool = True
) -> Iterator[Callable[..., None]]:
    """A function to call with the number of steps done and with what to show beside it."""
    if shown:
        with contextlib.suppress(ImportError):
            from anywidth.measuring.progress import training_progress

            with training_progress(total, description=description) as progress:
                yield progress.update
            return
    yield lambda done, **fields: None
