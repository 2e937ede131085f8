"""Options that several commands share: `run: options.RunFolder`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished training.")]
Width = Annotated[
    float | None, typer.Option(help="The width to run at, such as 0.5; if not given, the widest.")
]
MostTime = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Run the widest width that takes at most this long per example, such as 2ms. Uses the "
        "latencies of the run's spectrum, or measures them now.",
    ),
]
MostMacs = Annotated[
    str | None,
    typer.Option(
        "--max-macs",
        metavar="COUNT",
        help="Run the widest width with at most this many multiply-adds, such as 100M.",
    ),
]
MostParameters = Annotated[
    str | None,
    typer.Option(
        "--max-parameters",
        metavar="COUNT",
        help="Run the widest width with at most this many parameters, such as 1.5M.",
    ),
]
Channels = Annotated[
    Path | None,
    typer.Option(
        "--channels",
        metavar="FILE",
        help="Run the channels in a file that `anywidth search` wrote.",
    ),
]
ManyChannels = Annotated[
    list[Path] | None,
    typer.Option(
        "--channels",
        metavar="FILE",
        help="Also the channels in a file that `anywidth search` wrote; may be repeated.",
    ),
]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Allow the run to import the Python code that it names.")
]
Model = Annotated[
    str | None, typer.Option(help="Name the run's network again, if it is your own code.")
]
DataDir = Annotated[Path | None, typer.Option(help="New folder of the data, if it has moved.")]
EvalDir = Annotated[
    Path | None, typer.Option(help="Super-resolution: new folder of the evaluation pictures.")
]
