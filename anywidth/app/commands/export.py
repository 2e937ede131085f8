"""`anywidth export`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from anywidth.app.showing.output import say
from anywidth.app.showing.spectrum_tables import format_count
from anywidth.app.tasks.command_options import RunFolder, Width
from anywidth.app.tasks.examples import as_fact
from anywidth.app.tasks.registry import open_trained
from anywidth.app.tasks.results import saved_spectrum
from anywidth.app.tasks.trained import Trained
from anywidth.deploying.branching import write_branches
from anywidth.deploying.bundling import check_packages, write_bundle
from anywidth.deploying.deployment import Deployment
from anywidth.deploying.exporting import check_format, write_network
from anywidth.errors import AnywidthError
from anywidth.measuring.cost import macs, parameter_count
from anywidth.measuring.width_lists import parse_widths
from anywidth.slimming.convert import plan_of
from anywidth.slimming.extraction import extract

_BUNDLE = ".anywidth"


def export(
    run: RunFolder,
    out: Annotated[
        Path, typer.Option(help="The file to write: NAME.anywidth, NAME.onnx or NAME.pt2.")
    ],
    width: Width = None,
    widths: Annotated[
        str | None,
        typer.Option(
            help="Many widths: first:last:step, or a list such as 0.25,0.5,1.0. If not given, "
            "NAME.anywidth holds the run's own."
        ),
    ] = None,
) -> None:
    """Write a trained network as a file that runs without PyTorch.

    NAME.anywidth holds the network at many widths, its weights once. The package
    anywidth-runtime opens it, and anywidth serve serves it.
    NAME.onnx is for onnxruntime and most devices. With --widths it holds many
    widths, and an input `width` chooses one.
    NAME.pt2 is for torch.export.load and holds one width.

    Batch norm is folded, and normalising images is part of the file. The file is
    read back and compared with the network at every width before it counts as
    written. Every width must have been calibrated: anywidth calibrate RUN

    Examples:

      anywidth export runs/demo --widths 0.25:1.0:0.05 --out shirts.anywidth

      anywidth export runs/demo --width 0.4 --out shirts.onnx
    """
    _check(out, width, widths)
    trained, deployment = _opened(run, is_bundle=out.suffix == _BUNDLE)
    if out.suffix != _BUNDLE and widths is None:
        _export_one(trained, deployment, out, trained.chosen(width))
    else:
        many = parse_widths(widths) if widths else trained.widths if width is None else [width]
        _export_many(trained, deployment, out, [trained.chosen(width) for width in many])
    say(f"Takes {deployment.takes}: {_shape(deployment)}")
    say(f"Gives {', '.join(deployment.output_names)}")


def _opened(run: Path, *, is_bundle: bool) -> tuple[Trained, Deployment]:
    """A run and how its network is called; a bundle brings inputs along, to be tried on a page."""
    if is_bundle:
        with contextlib.suppress(AnywidthError):  # its data is elsewhere by now: no examples then
            trained = open_trained(run, "cpu")
            deployment = trained.deployment()
            facts = {**deployment.facts, "examples": as_fact(trained.examples())}
            return trained, dataclasses.replace(deployment, facts=facts)
    trained = open_trained(run, "cpu", with_data=False)
    return trained, trained.deployment()


def _check(out: Path, width: float | None, widths: str | None) -> None:
    """Refuses options that do not go together, before anything is opened."""
    if width is not None and widths is not None:
        raise AnywidthError(f"--width {width} and --widths {widths}: give one of them")
    if out.suffix == _BUNDLE:
        check_packages()
    else:
        check_format(out)
    if out.suffix == ".pt2" and widths is not None:
        raise AnywidthError(
            f"--out {out} --widths {widths}: NAME.pt2 holds one width; write NAME.anywidth or "
            "NAME.onnx, or give --width"
        )
    if not out.parent.is_dir():
        raise AnywidthError(f"--out {out}: there is no folder {out.parent}")


def _export_one(trained: Trained, deployment: Deployment, out: Path, width: float) -> None:
    own = trained.own_width(width)
    error = write_network(extract(trained.model, own, fold=True), deployment, out)
    costs = (
        f"{format_count(macs(trained.model, own))} multiply-adds",
        f"{format_count(parameter_count(trained.model, own))} parameters",
        f"{format_count(out.stat().st_size)}B",
    )
    say(f"Written: {out}, width {width}: {', '.join(costs)}")
    say(f"Read back and run: it differs from the network by {error:.1g} of the largest output")


def _export_many(
    trained: Trained, deployment: Deployment, out: Path, widths: Sequence[float]
) -> None:
    own: dict[Any, Any] = {width: trained.own_width(width) for width in widths}
    if out.suffix == _BUNDLE:
        spectrum = None
        with contextlib.suppress(AnywidthError):  # accuracy goes into the file if it was measured
            spectrum = saved_spectrum(trained.run)
        error = write_bundle(trained.model, deployment, out, own, spectrum=spectrum)
    else:
        error = write_branches(trained.model, deployment, out, list(own.values()))
    full = 4 * parameter_count(trained.model, plan_of(trained.model).full)
    size = out.stat().st_size
    say(
        f"Written: {out}, {len(own)} widths from {min(own)} to {max(own)}: {format_count(size)}B, "
        f"{size / full:.2f} times the full network's parameters"
    )
    say(
        f"Read back and run at every width: it differs from the network by {error:.1g} of the "
        "largest output"
    )
    if out.suffix == _BUNDLE:
        say(f"Serve it, with a page to try it: anywidth serve {out}")


def _shape(deployment: Deployment) -> str:
    """For example `float32, batch x 3 x 224 x 224`."""
    (example,), (axes,) = deployment.examples, deployment.free_axes
    sizes = [axes.get(axis, str(size)) for axis, size in enumerate(example.shape)]
    kind = str(example.dtype).removeprefix("torch.")
    return f"{kind}, {' x '.join(sizes)}"
