"""`anywidth predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anywidth.app.showing.output import say
from anywidth.app.tasks.command_options import Device, RunFolder, Width
from anywidth.errors import AnywidthError


def predict(
    run: RunFolder,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.")],
    width: Width = None,
    top: Annotated[int, typer.Option(help="How many classes to print.")] = 5,
    device: Device = "auto",
) -> None:
    """Classify an image with a trained network at a width of your choice.

    The width must have been calibrated: anywidth calibrate RUN --widths 0.4

    Example:

      anywidth predict runs/demo shirt.png --width 0.4
    """
    from anywidth.app.tasks.classification import prediction
    from anywidth.app.tasks.registry import open_only

    if top < 1:
        raise AnywidthError(f"--top {top}: expected at least 1 class")
    trained = open_only("classification", run, device)
    chosen = trained.chosen(width)
    with trained.at(chosen):
        for name, probability in prediction.predict(trained, image, top):
            say(f"{100 * probability:6.2f} %  {name}")
