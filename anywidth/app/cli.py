"""The `anywidth` command."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import re
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from anywidth.app.interrupts import exit_code, stopped_by_signals
from anywidth.app.plain_text import in_one_line, visible, write_anything

# Set by the shell, which --install-completion teaches to ask what a half-typed command may go on
# with.
_COMPLETION = "_ANYWIDTH_COMPLETE"
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calc")
# How often a thread of OpenMP looks for others before it sleeps: libgomp reads one of these when
# PyTorch is imported. With its default, threads that share a processor with another program keep
# each other waiting, and a step takes thirty times as long.
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_SPINS = "1000"
EXPECTED = {"integer": "a whole number", "float": "a number", "number": "a number"}


def main() -> None:
    """Run the command line; a user's mistake gives one clear line, not a traceback."""
    write_anything()
    sleep_soon()
    # Python would spend a second on cycles of garbage before the process ends.
    atexit.register(gc.freeze)
    # Pillow warns of large images long before it refuses them.
    warnings.filterwarnings("ignore", message="Image size .* decompression bomb")
    try:
        with stopped_by_signals():
            code = _run(sys.argv[1:])
            sys.stdout.flush()
    except KeyboardInterrupt:
        _end("Stopped.", exit_code())
    except BrokenPipeError:
        # The reader of the output is gone (`| head`), so the buffered rest is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except ModuleNotFoundError as error:
        _end(
            f"anywidth: the command line needs the package {error.name!r}; "
            "install it with: pip install 'anywidth[cli]'",
            2,
        )
    except (RuntimeError, MemoryError) as error:
        said = explained(error)
        if said is None:
            raise
        _end(f"anywidth: {said}", 1)
    except OSError as error:
        # Not a mistake in the arguments: no permission, a full disk, a lost mount.
        where = f": {error.filename}" if error.filename else ""
        _end(f"anywidth: {error.strerror or error}{where}", 1)
    raise SystemExit(code)


def sleep_soon() -> None:
    """Let PyTorch's threads sleep instead of waiting busily, unless the user has chosen."""
    if not any(name in os.environ for name in _WAITING):
        os.environ[_WAITING[0]] = _SPINS


def _run(arguments: list[str]) -> int:
    """The exit code. Typer's own runner is not used, because it hides an interrupt."""
    import typer
    from typer.main import get_command

    from anywidth.app.commands.app import app
    from anywidth.errors import AnywidthError

    # This class may be Typer's own or from a package that Typer depends on.
    usage_error: type[Any] = typer.BadParameter.__bases__[0]
    command = get_command(app)
    if asked := os.environ.get(_COMPLETION):
        from typer.completion import shell_complete

        return shell_complete(command, {}, "anywidth", _COMPLETION, asked)
    try:
        made = command.make_context("anywidth", arguments or ["--help"])
        with made as context, _heartbeat(arguments):
            command.invoke(context)
    except typer.Exit as exit_:
        return exit_.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except usage_error as error:
        _end(f"anywidth: {_said(error, arguments)}", 2)
    except AnywidthError as error:
        _end(f"anywidth: {in_one_line(str(error))}", 2)
    return 0


def _heartbeat(arguments: list[str]) -> AbstractContextManager[None]:
    """Long work that shows nothing says that it goes on; a server is silent between requests."""
    from anywidth.measuring.heartbeat import working

    if arguments[:1] in ([], ["serve"]):
        return nullcontext()
    return working(f"anywidth {arguments[0]}: still at work")


def _said(error: Any, arguments: list[str]) -> str:
    """The error in the arguments, in one line."""
    if close := getattr(error, "possibilities", None):
        return f"no option {error.option_name}; did you mean {close[0]}?"
    wrong = re.search(
        r"\bvalid (integer|float|number)\b|(?:range x>=|equal to )(\d+)", error.message
    )
    option = error.param.opts[0] if getattr(error, "param", None) is not None else ""
    given = _given(option, arguments)
    if wrong and given is not None:
        expected = EXPECTED[wrong[1]] if wrong[1] else f"at least {wrong[2]}"
        return f"{option} {given!r}: expected {expected}"
    where = f" (see: {error.ctx.command_path} --help)" if error.ctx is not None else ""
    return " ".join(error.format_message().split()) + where


def _given(option: str, arguments: list[str]) -> str | None:
    """The last value given for an option."""
    values = {option: None} | dict(itertools.pairwise(arguments))
    values |= dict(text.split("=", 1) for text in arguments if text.startswith(f"{option}="))
    return values[option]


def _end(text: str, code: int) -> None:
    print(visible(text), file=sys.stderr)
    raise SystemExit(code) from None


def explained(error: BaseException) -> str | None:
    """One line about a failure that this program knows; None for any other."""
    said = " ".join(str(error).split())
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if is_memory or any(words in said for words in _NO_MEMORY):
        return (
            f"not enough memory ({said[:200] or type(error).__name__}); use smaller inputs, a "
            "smaller --batch-size or a narrower network"
        )
    if said.startswith("DataLoader worker"):
        return (
            f"a process that decodes images ended ({said[:200]}); it may have had too little "
            "memory: continue the run with --resume and fewer --workers"
        )
    return None


if __name__ == "__main__":
    main()
