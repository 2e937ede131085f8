"""What commands print."""

from __future__ import annotations

import os

from rich.console import Console, ConsoleDimensions

# A pipe has no edge to stay within; pages that are broken later anyway are hard to read if broader.
_WIDTH_OF_A_PIPE = 120


class _Output(Console):
    """Standard output, also where that is not a terminal: rich takes a pipe for 80 columns."""

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


def say(text: str) -> None:
    """A line as it is: paths are not broken at the terminal's edge, nor read as markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
