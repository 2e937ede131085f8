"""One process per network of a benchmark, all at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from anywidth.errors import AnywidthError


def work_in_parallel(module: str, names: Sequence[str], arguments: Sequence[str]) -> None:
    """Start one process per network with the same options; each prints its own progress.

    Args:
        module: the benchmark, which takes --only NAME, --no-table and --parallel.
        names: the networks.
        arguments: the command-line arguments of the benchmark.
    """
    command = [sys.executable, "-m", module, *_shared(arguments), "--no-table", "--only"]
    children = {name: subprocess.Popen([*command, name]) for name in names}
    try:
        codes = {name: child.wait() for name, child in children.items()}
    except BaseException:
        for child in children.values():
            child.terminate()
        for child in children.values():
            child.wait()
        raise
    failed = [name for name, code in codes.items() if code]
    if failed:
        raise AnywidthError(f"{', '.join(failed)} ended with an error; see the lines above")


def _shared(arguments: Sequence[str]) -> list[str]:
    """The arguments that all processes share: all but the choice of networks."""
    rest, kept = list(arguments), []
    while rest:
        argument = rest.pop(0)
        if argument == "--only":
            rest.pop(0)
        elif argument != "--parallel" and not argument.startswith("--only="):
            kept.append(argument)
    return kept
