"""The style of figures, and how they are written as PNG or SVG files."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anywidth.errors import AnywidthError, packages_for
from anywidth.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT_INK, GRID = "#24292f", "#59636e", "#d9dee3"
"""Colours of text, secondary text and grid lines; a page in dark mode replaces them."""

BLUE, ORANGE, GREEN, PURPLE = "#2f7fd1", "#e0762a", "#2a9d73", "#b05fc0"
GREY = "#8a929b"
_STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT_INK,
    "axes.titlecolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": FAINT_INK,
    "ytick.labelcolor": FAINT_INK,
    "text.color": INK,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    # A folder may be called `run$1`: a dollar must not start a formula.
    "text.parse_math": False,
    # Text stays text, and names inside the file do not change from run to run.
    "svg.fonttype": "none",
    "svg.hashsalt": "anywidth",
}


def figure_bytes(figure: Figure, form: str, transparent: bool = False) -> bytes:
    """A figure as PNG or SVG, the same bytes for the same figure every time."""
    # No date, no address, no version: only the picture.
    nothing: dict[str, Any] = {
        "svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
        "png": {"Software": None},
    }
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=160, transparent=transparent, metadata=nothing[form])
    return buffer.getvalue()


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Use our style, whatever the user's own Matplotlib settings are."""
    with packages_for("a plot", "'anywidth[cli]'"):
        import matplotlib.style
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        # Names in other scripts stay text in an SVG, and are empty boxes in a PNG.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        yield


def write_figure(path: str | Path, draw: Callable[[], Figure]) -> None:
    """Draw in our style, and replace the file once the new one is complete."""
    path = Path(path)
    form = path.suffix.lower().removeprefix(".")
    if form not in ("png", "svg"):
        raise AnywidthError(f"cannot draw {path}: expected a name that ends in .png or .svg")
    with style():
        content = figure_bytes(draw(), form)
    write_atomically(path, content)


def write_figures(stem: Path, draw: Callable[[], Figure]) -> None:
    """Draw once in our style, and write STEM.png and STEM.svg."""
    with style():
        figure = draw()
        contents = {form: figure_bytes(figure, form) for form in ("png", "svg")}
    for form, content in contents.items():
        write_atomically(stem.with_name(f"{stem.name}.{form}"), content)
