"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")]
Width = Annotated[float | None, typer.Option(help="The width to run at; the widest if not given.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data lies now, if it has moved.")]
EvalDir = Annotated[
    Path | None, typer.Option(help="Super-resolution: where the evaluation pictures lie now.")
]
