"""`anywidth predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anywidth.app.commands.output import say
from anywidth.app.commands.tasks import CLASSIFICATION, open_only
from anywidth.app.showing.results import check_calibrated, network_width
from anywidth.app.tasks.classification import prediction
from anywidth.errors import AnywidthError
from anywidth.slimming.convert import at_width


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.")],
    width: Annotated[
        float | None, typer.Option(help="The width to run at; the widest if not given.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many classes to print.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Classify an image with a trained network at a width of your choice.

    The width must have been calibrated: anywidth calibrate RUN --widths 0.4

    Example:

      anywidth predict runs/demo shirt.png --width 0.4
    """
    if top < 1:
        raise AnywidthError(f"--top {top}: expected at least 1 class")
    trained = open_only(CLASSIFICATION, run, device, "knows no classes")
    chosen = network_width(trained, width)
    check_calibrated(trained, chosen)
    with at_width(trained.model, chosen):
        for name, probability in prediction.predict(trained, image, top):
            text = f"{100 * probability:6.2f} %  {name}"
            say(text)
