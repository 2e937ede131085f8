"""`anywidth serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from anywidth.errors import AnywidthError, packages_for


def serve(
    bundle: Annotated[
        Path, typer.Argument(metavar="NET.anywidth", help="A bundle, written by anywidth export.")
    ],
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 lets other machines connect.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 for any free port.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name in URLs; the file name if not given.")
    ] = None,
    deadline_ms: Annotated[
        float, typer.Option(help="Deadline in milliseconds of requests that give none.")
    ] = 1000.0,
    late: Annotated[
        Literal["drop", "answer"],
        typer.Option(help="What to do with requests that cannot be answered in time."),
    ] = "drop",
    least_width: Annotated[
        float | None, typer.Option(help="Never run narrower than this width.")
    ] = None,
    least_accuracy: Annotated[
        float | None, typer.Option(help="Never run a width of lower accuracy than this.")
    ] = None,
    hysteresis: Annotated[
        float,
        typer.Option(help="Share of the time that must be free before the width grows; for video."),
    ] = 0.0,
    threads: Annotated[int, typer.Option(help="Threads per pass of the network.")] = 1,
    workers: Annotated[
        int, typer.Option(help="Passes at the same time; 0 for one less than there are cores.")
    ] = 0,
    most_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; more are answered with 503.")
    ] = 256,
    most_body: Annotated[
        int, typer.Option(help="Largest request in bytes; larger ones are answered with 413.")
    ] = 16 * 2**20,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that requests must send (or set ANYWIDTH_TOKEN)."),
    ] = None,
    has_page: Annotated[bool, typer.Option("--page/--no-page", help="Show the page at /.")] = True,
    ray: Annotated[
        bool, typer.Option("--ray", help="Serve with Ray Serve, on the machines of its cluster.")
    ] = False,
    replicas: Annotated[
        int, typer.Option(help="With --ray: number of replicas, or the least number.")
    ] = 1,
    most_replicas: Annotated[
        int | None, typer.Option(help="With --ray: largest number of replicas.")
    ] = None,
    target_width: Annotated[
        float | None,
        typer.Option(help="With --ray: add replicas while the mean width is below this."),
    ] = None,
) -> None:
    """Serve an exported network over HTTP, each request at the widest width that is fast enough.

    Under load the server runs narrower widths, so that requests still meet their
    deadlines. It speaks the Open Inference Protocol (v2), accepts image files
    too, and has a page with a slider over all widths. After Ctrl-C it answers
    the requests it has accepted, and stops.

    Example:

      anywidth export runs/demo --out net.anywidth

      anywidth serve net.anywidth
    """
    options = dict(locals())  # all of them are the server's
    with packages_for("serving", "'./runtime[ray]'" if ray else "'./runtime[serve]'"):
        from anywidth_runtime.errors import BundleError, RequestError
        from anywidth_runtime.server.running import start

        try:
            start(**options)
        except (BundleError, RequestError) as error:
            raise AnywidthError(str(error)) from error
