"""`anywidth serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from anywidth.errors import AnywidthError


def serve(
    bundle: Annotated[
        Path, typer.Argument(metavar="NET.anywidth", help="What anywidth export wrote.")
    ],
    host: Annotated[
        str, typer.Option(help="The address to listen at; others can reach 0.0.0.0.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen at; 0 for any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name in addresses; the file's if not given.")
    ] = None,
    deadline_ms: Annotated[
        float, typer.Option(help="When answers are due to requests that name no deadline.")
    ] = 1000.0,
    late: Annotated[
        Literal["drop", "answer"],
        typer.Option(help="What becomes of requests that cannot be in time."),
    ] = "drop",
    least_width: Annotated[
        float | None, typer.Option(help="The governor never goes narrower.")
    ] = None,
    least_accuracy: Annotated[
        float | None, typer.Option(help="The governor never goes below this accuracy.")
    ] = None,
    hysteresis: Annotated[
        float, typer.Option(help="Share of the time that must be left over to widen; for video.")
    ] = 0.0,
    threads: Annotated[int, typer.Option(help="Threads of one run of the network.")] = 1,
    workers: Annotated[int, typer.Option(help="Runs at once; 0 for one per core, less one.")] = 0,
    most_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; one more is answered 503.")
    ] = 256,
    most_body: Annotated[
        int, typer.Option(help="Bytes that a request may have; more is answered 413.")
    ] = 16 * 2**20,
    token_file: Annotated[
        Path | None,
        typer.Option(help="Holds the token that requests must bring (or set ANYWIDTH_TOKEN)."),
    ] = None,
    page: Annotated[bool, typer.Option(help="Show the page at /.")] = True,
    ray: Annotated[
        bool, typer.Option("--ray", help="Serve with Ray Serve: on the machines of its cluster.")
    ] = False,
    replicas: Annotated[int, typer.Option(help="With --ray: how many, or at least.")] = 1,
    most_replicas: Annotated[
        int | None, typer.Option(help="With --ray: add replicas up to so many.")
    ] = None,
    target_width: Annotated[
        float | None, typer.Option(help="With --ray: while the mean width served is below this.")
    ] = None,
) -> None:
    """Serve a bundle over HTTP: every request at the widest width that is in time.

    Speaks the Open Inference Protocol (v2), takes image files too, and shows a page where one can
    try every width. Ctrl-C ends it after all that was accepted is answered.

    Example:

      anywidth export runs/demo --out net.anywidth

      anywidth serve net.anywidth
    """
    try:
        from anywidth_runtime.errors import BundleError, RequestError
        from anywidth_runtime.server.settings import Settings, model_name, read_token
        from anywidth_runtime.server.starting import start
    except ModuleNotFoundError as error:
        raise AnywidthError(
            f"serving needs the package {error.name!r}: pip install './runtime[serve]'"
        ) from error
    try:
        settings = Settings(
            name=name or model_name(bundle),
            deadline_ms=deadline_ms,
            late=late,
            least_width=least_width,
            least_accuracy=least_accuracy,
            hysteresis=hysteresis,
            threads=threads,
            workers=workers,
            most_waiting=most_waiting,
            most_body=most_body,
            token=read_token(token_file),
            has_page=page,
        )
        start(
            bundle,
            settings,
            host=host,
            port=port,
            with_ray=ray,
            replicas=replicas,
            most_replicas=most_replicas,
            target_width=target_width,
        )
    except ModuleNotFoundError as error:
        extra = "ray" if ray else "serve"
        raise AnywidthError(
            f"serving needs the package {error.name!r}: pip install './runtime[{extra}]'"
        ) from error
    except (BundleError, RequestError) as error:
        raise AnywidthError(str(error)) from error
