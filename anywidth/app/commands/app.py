"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from anywidth._version import __version__
from anywidth.app.commands.evaluate import calibrate, compare, report, spectrum
from anywidth.app.commands.export import export
from anywidth.app.commands.inspect import inspect
from anywidth.app.commands.serve import serve
from anywidth.app.commands.study import study
from anywidth.app.commands.train import train
from anywidth.app.tasks.registry import TASKS, task_named


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
    """Train one network, run it at any width."""


EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.callback()(options)
app.command(context_settings=EXTRA)(train)
app.command()(calibrate)
app.command()(spectrum)
app.command()(compare)
app.command()(report)
for task in TASKS:
    app.command()(task_named(task).command)
app.command()(export)
app.command()(serve)
app.command()(inspect)
app.command()(study)
