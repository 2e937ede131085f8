"""`anywidth export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anywidth.app.commands.output import say
from anywidth.app.commands.tasks import open_trained, task_of
from anywidth.app.showing.results import check_calibrated, network_width, shown_width
from anywidth.app.showing.spectrum_tables import format_count
from anywidth.deploying.deployment import Deployment
from anywidth.deploying.exporting import check_format, write_network
from anywidth.errors import AnywidthError
from anywidth.measuring.cost import macs, parameter_count
from anywidth.slimming.extraction import extract


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    out: Annotated[Path, typer.Option(help="The file to write: NAME.onnx or NAME.pt2.")],
    width: Annotated[
        float | None, typer.Option(help="The width to cut out; the widest if not given.")
    ] = None,
) -> None:
    """Write a trained network at one width as a file that runs without this library.

    ONNX (.onnx) for onnxruntime and most devices, or .pt2 for torch.export.load.
    Batch norm is folded, and normalising images is part of the file. It is read
    back and compared with the network before it counts as written.

    The width must have been calibrated: anywidth calibrate RUN --widths 0.4

    Example:

      anywidth export runs/demo --width 0.4 --out shirts.onnx
    """
    check_format(out)
    if not out.parent.is_dir():
        raise AnywidthError(f"--out {out}: there is no folder {out.parent}")
    trained = open_trained(run, "cpu", with_data=False)
    chosen = network_width(trained, width)
    check_calibrated(trained, chosen)
    deployment = task_of(run).deploy(trained)
    difference = write_network(extract(trained.model, chosen, fold=True), deployment, out)
    costs = (
        f"{format_count(macs(trained.model, chosen))} multiply-adds",
        f"{format_count(parameter_count(trained.model, chosen))} parameters",
        f"{format_count(out.stat().st_size)}B",
    )
    say(f"Written: {out}, width {shown_width(trained, chosen)}: {', '.join(costs)}")
    say(f"Takes {deployment.takes}: {_shape(deployment)}")
    say(f"Gives {', '.join(deployment.output_names)}")
    say(f"Read back and run: it differs from the network by {difference:.1g} of the largest output")


def _shape(deployment: Deployment) -> str:
    """Say `float32, batch x 3 x 224 x 224`."""
    (example,), (axes,) = deployment.examples, deployment.free_axes
    sizes = [axes.get(axis, str(size)) for axis, size in enumerate(example.shape)]
    kind = str(example.dtype).removeprefix("torch.")
    return f"{kind}, {' x '.join(sizes)}"
