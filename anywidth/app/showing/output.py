"""The output of commands."""

from __future__ import annotations

import os

from rich.console import Console, ConsoleDimensions

from anywidth.app.plain_text import visible
from anywidth.measuring.heartbeat import shown

# A pipe has no width of its own; wider text is hard to read.
_WIDTH_OF_A_PIPE = 120


class _Output(Console):
    """Standard output; unlike in rich, a pipe has more than 80 columns."""

    @property
    def size(self) -> ConsoleDimensions:
        found = super().size
        asked = os.environ.get("COLUMNS", "")
        if asked.isdigit():
            return ConsoleDimensions(int(asked), found.height)
        return found if self.is_terminal else ConsoleDimensions(_WIDTH_OF_A_PIPE, found.height)

    @size.setter
    def size(self, new: tuple[int, int]) -> None:
        self.width, self.height = new


console = _Output()
_beside = _Output(stderr=True)


def say(text: str) -> None:
    """Print a line unchanged: paths are not wrapped or read as markup."""
    console.print(visible(text), highlight=False, markup=False, soft_wrap=True)
    shown()


def note(text: str) -> None:
    """Print a line on standard error, so that standard output has only the answer."""
    _beside.print(visible(text), highlight=False, markup=False, soft_wrap=True)
    shown()
