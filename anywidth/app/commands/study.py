"""`anywidth study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def study(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Studies (--list prints them), or all."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="bundled, cifar10, folder (ImageNet's layout), pictures (super-resolution) or "
            "atari (reinforcement); see --list."
        ),
    ] = "bundled",
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Seeds per training; if not given, 1 for bundled, else as in --list."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of every training.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for runs and results; if not given, runs/study-DATA."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after this many minutes; the same command continues."),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(min=1, help="Trainings at once; if not given, one per core, or one on a GPU."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Run only trainings whose names contain this text.")
    ] = None,
    only_training: Annotated[
        bool, typer.Option("--only-training", help="Train and measure, but write no tables.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Change a field of the recipe; may be repeated."
        ),
    ] = None,
    list_studies: Annotated[
        bool, typer.Option("--list", help="List the studies and their cost.")
    ] = False,
) -> None:
    """Repeat a table or figure of the paper: train its networks, and compare the results.

    Studies in one folder share their trainings, and a finished training is not
    repeated. After Ctrl-C, a kill or --minutes, the same command continues.

    Examples:

      anywidth study --list

      anywidth study main               bundled images, on a CPU

      anywidth study all --data cifar10 --data-dir DIR --parallel 8 --minutes 25

      anywidth study super-resolution --data pictures --data-dir DIR --set eval_dir=SETS
    """
    options = dict(locals())
    from anywidth.app.commands import studying

    if options.pop("list_studies"):
        studying.print_studies()
    else:
        studying.run_studies(**options)
