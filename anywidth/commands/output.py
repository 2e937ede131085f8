"""What commands print."""

from __future__ import annotations

from rich.console import Console

console = Console()


def say(text: str) -> None:
    """A line as it is: paths are not broken at the terminal's edge, nor read as markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
