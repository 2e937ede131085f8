"""The `anywidth` command with all its subcommands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from anywidth._version import __version__
from anywidth.app.commands.evaluate import calibrate, compare, report, spectrum, tune
from anywidth.app.commands.export import export
from anywidth.app.commands.inspect import inspect
from anywidth.app.commands.search_command import search
from anywidth.app.commands.serve import serve
from anywidth.app.commands.study import study
from anywidth.app.commands.train import train
from anywidth.app.tasks.task_names import TASKS, command_of


def _print_version(is_asked_for: bool) -> None:
    if is_asked_for:
        print(f"anywidth {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Train one network, run it at any width.

    A width is the share of a network's channels that run: 1.0 is the whole
    network, 0.25 a quarter of each layer's channels and about a fifteenth of
    the work. One training gives all widths between, and you choose one when you
    run the network.

    Start here (bundled images, minutes on a CPU):

      anywidth train --out runs/demo                  train, measure, write a report

      anywidth predict runs/demo shirt.png --width 0.4

      anywidth export runs/demo --out net.anywidth    one file with all widths

      anywidth serve net.anywidth                     a page with a slider

    Every command has examples: anywidth COMMAND --help
    """


# The headings of `anywidth --help`, below "Train".
PANELS: dict[str, Sequence[Callable[..., None]]] = {
    "Measure a trained network": (spectrum, report, compare, calibrate, tune),
    "Run a trained network": [command_of(task) for task in TASKS],
    "Deploy it": (export, serve),
    "Look closer": (inspect, search, study),
}
EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.callback()(options)
app.command(context_settings=EXTRA, rich_help_panel="Train")(train)
for heading, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=heading)(command)
