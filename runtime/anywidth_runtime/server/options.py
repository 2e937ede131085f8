"""The options of `python -m anywidth_runtime serve` and `measure`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from anywidth_runtime.errors import BundleError, RequestError
from anywidth_runtime.network import open as open_network
from anywidth_runtime.server.settings import TOKEN_VARIABLE, Settings

_DEFAULTS = Settings()


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `serve`."""
    parser = commands.add_parser(
        "serve", help="serve a bundle over HTTP", description="Serve a bundle over HTTP."
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="NET.anywidth", help="a file written by anywidth export")
    add("--host", default="127.0.0.1", help="the address to listen at (only this machine)")
    add("--port", type=int, default=8000, help="the port to listen at; 0 for any (8000)")
    add("--name", default=None, help="the model's name in addresses (the file's)")
    add("--deadline-ms", type=float, default=_DEFAULTS.deadline_ms, metavar="MS",
        help="when answers are due to requests that name no deadline (1000)")  # fmt: skip
    add("--late", choices=("drop", "answer"), default=_DEFAULTS.late,
        help="what to do with requests that cannot be in time (drop)")  # fmt: skip
    add("--least-width", type=float, help="the governor never goes narrower")
    add("--least-accuracy", type=float, help="the governor never goes below this accuracy")
    add("--hysteresis", type=float, default=0.0, help="time left over before widening (0)")
    add("--threads", type=int, default=1, help="threads of one run (1)")
    add("--workers", type=int, default=0, help="runs at once (one per core, less one)")
    add("--most-waiting", type=int, default=_DEFAULTS.most_waiting, help="queue length (256)")
    add("--most-body", type=int, default=_DEFAULTS.most_body, help="bytes per request (16 MiB)")
    add("--token-file", type=Path,
        help=f"file with the token that requests must send (or set {TOKEN_VARIABLE})")  # fmt: skip
    add("--no-page", dest="has_page", action="store_false", help="no page at /")
    add("--ray", action="store_true", help="serve with Ray Serve, on many machines if there are")
    add("--replicas", type=int, default=1, help="with --ray: how many, or at least (1)")
    add("--most-replicas", type=int, help="with --ray: add replicas up to so many")
    add("--target-width", type=float, help="with --ray: while the mean width is below this")
    parser.set_defaults(run=_serve)


def add_measure(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `measure`."""
    parser = commands.add_parser(
        "measure", help="time all widths of a bundle", description="Time all widths of a bundle."
    )
    parser.add_argument("bundle", type=Path, metavar="NET.anywidth", help="the bundle")
    parser.add_argument("--threads", type=int, default=1, help="threads of one run (1)")
    parser.add_argument("--repeats", type=int, default=20, help="runs per width (20)")
    parser.set_defaults(run=_measure)


def _measure(arguments: argparse.Namespace) -> None:
    network = open_network(arguments.bundle, threads=arguments.threads)
    for row in network.measure(repeats=arguments.repeats):
        print(f"{row.width}: {row.latency_ms:.4g} ms")
    kept = Path(f"{arguments.bundle}.latency.json")
    if not kept.is_file():
        raise RequestError(f"{kept}: the times could not be written; is the folder read-only?")
    print(f"Written: {kept}")


def _serve(arguments: argparse.Namespace) -> None:
    from anywidth_runtime.server.running import start  # `measure` does not need its packages

    start(**{name: value for name, value in vars(arguments).items() if name != "run"})


def main(arguments: list[str] | None = None) -> int:
    """`python -m anywidth_runtime`; a user's mistake is reported in one line."""
    parser = argparse.ArgumentParser("anywidth_runtime", description="Run networks of any width.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_serve(commands)
    add_measure(commands)
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
