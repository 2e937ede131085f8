"""The options of `python -m anywidth_runtime serve`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from anywidth_runtime.errors import BundleError, RequestError
from anywidth_runtime.server.settings import TOKEN_VARIABLE, Settings, model_name, read_token
from anywidth_runtime.server.starting import start

_DEFAULTS = Settings()


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `serve`."""
    parser = commands.add_parser(
        "serve", help="serve a bundle over HTTP", description="Serve a bundle over HTTP."
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="NET.anywidth", help="what anywidth export wrote")
    add("--host", default="127.0.0.1", help="the address to listen at (this machine alone)")
    add("--port", type=int, default=8000, help="the port to listen at; 0 for any (8000)")
    add("--name", default=None, help="the model's name in addresses (the file's)")
    add("--deadline-ms", type=float, default=_DEFAULTS.deadline_ms, metavar="MS",
        help="when answers are due to requests that name no deadline (1000)")  # fmt: skip
    add("--late", choices=("drop", "answer"), default=_DEFAULTS.late,
        help="what becomes of requests that cannot be in time (drop)")  # fmt: skip
    add("--least-width", type=float, help="the governor never goes narrower")
    add("--least-accuracy", type=float, help="the governor never goes below this accuracy")
    add("--hysteresis", type=float, default=0.0, help="time left over before widening (0)")
    add("--threads", type=int, default=1, help="threads of one run (1)")
    add("--workers", type=int, default=0, help="runs at once (one per core, less one)")
    add("--most-waiting", type=int, default=_DEFAULTS.most_waiting, help="queue length (256)")
    add("--most-body", type=int, default=_DEFAULTS.most_body, help="bytes per request (16 MiB)")
    add("--token-file", type=Path,
        help=f"holds the token that requests must bring (or set {TOKEN_VARIABLE})")  # fmt: skip
    add("--no-page", action="store_true", help="no page at /")
    add("--ray", action="store_true", help="serve with Ray Serve, on many machines if there are")
    add("--replicas", type=int, default=1, help="with --ray: how many, or at least (1)")
    add("--most-replicas", type=int, help="with --ray: add replicas up to so many")
    add("--target-width", type=float, help="with --ray: while the mean width is below this")
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> None:
    settings = Settings(
        name=arguments.name or model_name(arguments.bundle),
        deadline_ms=arguments.deadline_ms,
        late=arguments.late,
        least_width=arguments.least_width,
        least_accuracy=arguments.least_accuracy,
        hysteresis=arguments.hysteresis,
        threads=arguments.threads,
        workers=arguments.workers,
        most_waiting=arguments.most_waiting,
        most_body=arguments.most_body,
        token=read_token(arguments.token_file),
        has_page=not arguments.no_page,
    )
    replicas = {name: getattr(arguments, name) for name in ("replicas", "most_replicas")}
    start(
        arguments.bundle,
        settings,
        host=arguments.host,
        port=arguments.port,
        with_ray=arguments.ray,
        **replicas,
        target_width=arguments.target_width,
    )


def main(arguments: list[str] | None = None) -> int:
    """`python -m anywidth_runtime`; what a user did wrong ends in one line."""
    parser = argparse.ArgumentParser("anywidth_runtime", description="Runs networks of any width.")
    add_serve(parser.add_subparsers(required=True, metavar="COMMAND"))
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except ModuleNotFoundError as error:
        print(
            f"anywidth_runtime: serving needs the package {error.name!r}; install it with: "
            "pip install 'anywidth-runtime[serve]'",
            file=sys.stderr,
        )
        return 2
    except (BundleError, RequestError) as error:
        print(f"anywidth_runtime: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
