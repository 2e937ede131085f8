"""`anywidth tune`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from anywidth.app.commands.evaluate import chosen_widths, counted, hold, say_older
from anywidth.app.own_command import own_command
from anywidth.app.showing.output import say
from anywidth.app.tasks import command_options as options
from anywidth.errors import AnywidthError

if TYPE_CHECKING:
    from anywidth.app.tasks.trained import Trained


def tune(
    run: options.RunFolder,
    widths: Annotated[
        str, typer.Option(help="Calibrated widths, as a list such as 0.25,0.5 or first:last:step.")
    ],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate of Adam.")] = 1e-3,
    device: options.Device = "auto",
    model: options.Model = None,
    trust: options.Trust = False,
    data_dir: options.DataDir = None,
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
    _check(trained, chosen, learning_rate)
    images = trained.tune(chosen, epochs, learning_rate)
    say(f"{counted(chosen)} tuned over {images:,} images: {', '.join(map(str, chosen))}")
    say_older(trained)


def _check(trained: Trained, widths: Sequence[float], learning_rate: float) -> None:
    from anywidth.slimming.convert import plan_of

    if not 0 < learning_rate < math.inf:
        raise AnywidthError(f"--learning-rate {learning_rate}: expected a number above 0")
    plan = plan_of(trained.model)
    full = [width for width in widths if plan.resolve(trained.own_width(width)) == plan.full]
    if full:
        raise AnywidthError(
            f"--widths {full[0]}: the scales and biases of the full width are the network's own, "
            "which other widths use too; leave it out"
        )
    if missing := trained.uncalibrated(widths):
        named, folder = ",".join(map(str, missing)), trained.run.folder
        again = own_command("calibrate", folder, "--widths", named, *trained.settings.allowance)
        raise AnywidthError(f"no statistics for width {named} yet; compute them with: {again}")
