"""`anywidth tune`."""

from __future__ import annotations

from typing import Annotated

import typer

from anywidth.app.commands.evaluate import chosen_widths, counted, hold, say_older
from anywidth.app.showing.output import say
from anywidth.app.tasks.command_options import DataDir, Device, Model, RunFolder, Trust
from anywidth.errors import AnywidthError


def tune(
    run: RunFolder,
    widths: Annotated[
        str, typer.Option(help="Calibrated widths, as a list such as 0.25,0.5 or first:last:step.")
    ],
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate of Adam.")] = 1e-3,
    device: Device = "auto",
    model: Model = None,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Tune batch norm's scales and biases for a few widths of a trained network, and save them.

    All weights and all other widths stay as they are. The widths must have
    statistics, which are computed again; `anywidth calibrate` makes them.

    Example:

      anywidth tune runs/demo --widths 0.25,0.5
    """
    from anywidth.app.tasks.registry import open_trained

    _lock = hold(run)
    if not open_trained(run, device, with_data=False, trust=trust, model=model).has_statistics:
        raise AnywidthError(f"{run} has a network without batch norm: there is nothing to tune")
    trained = open_trained(run, device, trust=trust, model=model, data_dir=data_dir)
    chosen = chosen_widths(trained, widths)
    images = trained.tune(chosen, epochs, learning_rate)
    say(f"{counted(chosen)} tuned over {images:,} images: {', '.join(map(str, chosen))}")
    say_older(trained)
