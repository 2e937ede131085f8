"""`anywidth export`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anywidth.app.own_command import own_command
from anywidth.app.showing.output import say
from anywidth.app.tasks import command_options as options
from anywidth.errors import AnywidthError
from anywidth.measuring.heartbeat import nothing, speaking, working
from anywidth.measuring.width_lists import parse_widths

if TYPE_CHECKING:
    from anywidth.app.tasks.chosen_width import Wanted
    from anywidth.app.tasks.trained import Trained
    from anywidth.translating.deployment import Deployment
    from anywidth.width import Width

_BUNDLE = ".anywidth"


def export(
    run: options.RunFolder,
    out: Annotated[
        Path, typer.Option(help="The file to write: NAME.anywidth, NAME.onnx or NAME.pt2.")
    ],
    width: options.Width = None,
    budget: options.MostTime = None,
    max_macs: options.MostMacs = None,
    max_parameters: options.MostParameters = None,
    widths: Annotated[
        str | None,
        typer.Option(
            help="Many widths: first:last:step, or a list such as 0.25,0.5,1.0. If not given, "
            "NAME.anywidth gets the run's own widths, or those within --budget, --max-macs and "
            "--max-parameters."
        ),
    ] = None,
    channels: Annotated[
        list[Path] | None,
        typer.Option(
            "--channels",
            metavar="FILE",
            help="Instead of --width: the channels in a file that `anywidth search` wrote. "
            "NAME.anywidth takes several, also with --widths, and names them after their files.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite an existing file without asking.")
    ] = False,
    model: options.Model = None,
    trust: options.Trust = False,
) -> None:
    """Write a trained network to a file that runs without anywidth.

    The ending of --out decides the format:

      NAME.anywidth  many widths, weights stored once; for the package
      anywidth-runtime and for anywidth serve

      NAME.onnx      one width; for onnxruntime and most devices. With --widths it
      has many widths, and its input `width` selects one

      NAME.pt2       one width; for torch.export.load

    Batch norm is folded, and the file normalises images itself. It is compared
    with the network at every width before it replaces an older file. Widths
    without batch-norm statistics are calibrated first, which needs the run's
    data.

    Examples:

      anywidth export runs/demo --widths 0.25:1.0:0.05 --out shirts.anywidth

      anywidth export runs/demo --width 0.4 --out shirts.onnx
    """
    from anywidth.app.tasks.chosen_width import Wanted, calibrated, given_channels

    first = channels[0] if channels else None
    wanted = Wanted(width, budget, max_macs, max_parameters, first)
    _check(out, wanted, widths, channels or [])
    _check_free(out, force)
    with working(f"opening {run}"):
        trained, deployment = _opened(run, model, trust, is_bundle=out.suffix == _BUNDLE)
    named: dict[float | str, Width] = {
        path.stem: given_channels(trained, path) for path in channels or ()
    }
    if widths is not None or not named:
        uniform = _widths(trained, wanted, widths, is_bundle=out.suffix == _BUNDLE)
        named = {**dict(zip(uniform, uniform, strict=True)), **named}
    trained = calibrated(trained, list(named.values()))
    if out.suffix != _BUNDLE and widths is None:
        _export_one(trained, deployment, out, *named.items())
    else:
        _export_many(trained, deployment, out, named)
    say(f"Takes {deployment.takes}: {_shape(deployment)}")
    say(f"Gives {', '.join(deployment.output_names)}")


def _opened(
    run: Path, model: str | None, trust: bool, *, is_bundle: bool
) -> tuple[Trained, Deployment]:
    """A run and its deployment; a bundle also has example inputs for the server's page."""
    from anywidth.app.tasks.registry import open_trained
    from anywidth.app.tasks.trained import as_fact

    trained = open_trained(run, "cpu", with_data=False, trust=trust, model=model)
    deployment = trained.deployment()
    if is_bundle:
        with contextlib.suppress(AnywidthError):  # no examples if its data has moved
            trained = trained.with_data()
            facts = {**deployment.facts, "examples": as_fact(trained.examples())}
            deployment = dataclasses.replace(deployment, facts=facts)
    return trained, deployment


def _widths(
    trained: Trained, wanted: Wanted, widths: str | None, *, is_bundle: bool
) -> list[float]:
    """The widths to write; a bundle has all of the run's that a budget allows."""
    from anywidth.app.tasks.chosen_width import fitting_widths

    if widths is not None:
        return [trained.chosen(width) for width in parse_widths(widths)]
    if not is_bundle or wanted.width is not None:
        return [max(fitting_widths(trained, wanted))]
    if not wanted.limits():
        return trained.widths
    widest = max(fitting_widths(trained, wanted))
    return [width for width in trained.widths if width <= widest] or [widest]


def _check_free(out: Path, force: bool) -> None:
    """Ask before a file is overwritten; refuse if there is nobody to ask."""
    if force or not out.exists():
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise AnywidthError(f"--out {out} exists already: overwrite it with --force, or rename it")
    with speaking(nothing()):
        typer.confirm(f"{out} exists already. Overwrite it?", abort=True, err=True)


def _check(out: Path, wanted: Wanted, widths: str | None, channels: Sequence[Path]) -> None:
    """Refuse options that contradict each other, before anything is opened."""
    from anywidth.deploying.bundling import check_packages
    from anywidth.deploying.exporting import check_format

    limits = wanted.limits()
    if widths is not None and (limits or wanted.width is not None):
        given = limits[0] if limits else f"--width {wanted.width}"
        raise AnywidthError(f"{given} and --widths {widths}: give only one of them")
    if len({path.stem for path in channels}) < len(channels):
        raise AnywidthError("--channels: two files have the same name, which the bundle would use")
    if out.suffix != _BUNDLE and (len(channels) > 1 or (channels and widths is not None)):
        raise AnywidthError(
            f"--out {out} --channels {channels[0]}: this file has one configuration; write "
            "NAME.anywidth for several"
        )
    if out.suffix == _BUNDLE:
        check_packages()
    else:
        check_format(out)
    if out.suffix == ".pt2" and widths is not None:
        raise AnywidthError(
            f"--out {out} --widths {widths}: NAME.pt2 has one width; write NAME.anywidth or "
            "NAME.onnx, or give --width"
        )
    if not out.parent.is_dir():
        raise AnywidthError(f"--out {out}: there is no folder {out.parent}")


def _export_one(
    trained: Trained, deployment: Deployment, out: Path, one: tuple[float | str, Width]
) -> None:
    from anywidth.app.showing.spectrum_tables import format_count
    from anywidth.deploying.exporting import write_network
    from anywidth.measuring.cost import macs, parameter_count
    from anywidth.slimming.extraction import extract

    name, width = one
    own = trained.own_width(width)
    with working(f"converting width {width}"):
        error = write_network(extract(trained.model, own, fold=True), deployment, out)
    costs = (
        f"{format_count(macs(trained.model, own))} multiply-adds",
        f"{format_count(parameter_count(trained.model, own))} parameters",
        f"{format_count(out.stat().st_size)}B",
    )
    said = name if isinstance(name, str) else f"width {name}"
    say(f"Written: {out}, {said}: {', '.join(costs)}")
    say(f"Read back and checked: largest error {error:.1g} of the largest output")


def _export_many(
    trained: Trained, deployment: Deployment, out: Path, widths: Mapping[float | str, Width]
) -> None:
    from anywidth.app.showing.spectrum_tables import format_count
    from anywidth.app.tasks.results import earlier_spectrum
    from anywidth.deploying.branching import write_branches
    from anywidth.deploying.bundling import write_bundle
    from anywidth.measuring.cost import parameter_count
    from anywidth.slimming.convert import plan_of

    own: dict[Any, Any] = {name: trained.own_width(width) for name, width in widths.items()}
    if out.suffix == _BUNDLE:
        spectrum = earlier_spectrum(trained.run)  # its accuracies go into the file
        error = write_bundle(trained.model, deployment, out, own, spectrum=spectrum)
    else:
        error = write_branches(trained.model, deployment, out, list(own.values()))
    full = 4 * parameter_count(trained.model, plan_of(trained.model).full)
    size = out.stat().st_size
    names = list(own)
    several = f"{len(own)} widths from {names[0]} to {names[-1]}" if len(own) > 1 else names[0]
    say(
        f"Written: {out}, {several}: {format_count(size)}B, "
        f"{size / full:.2f} times the full network's parameters"
    )
    say(f"Read back and checked at every width: largest error {error:.1g} of the largest output")
    if out.suffix == _BUNDLE:
        say(f"To serve it, with a page to try it: {own_command('serve', out)}")


def _shape(deployment: Deployment) -> str:
    """For example `float32, batch x 3 x 224 x 224`."""
    (example,), (axes,) = deployment.examples, deployment.free_axes
    sizes = [axes.get(axis, str(size)) for axis, size in enumerate(example.shape)]
    kind = str(example.dtype).removeprefix("torch.")
    return f"{kind}, {' x '.join(sizes)}"
