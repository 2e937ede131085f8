"""The `anywidth` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; what a user did wrong ends in one clear line, not in a traceback."""
    try:
        from anywidth.commands.app import app
    except ModuleNotFoundError as error:
        print(
            f"anywidth: the command line needs the package {error.name!r}; "
            "install it with: pip install 'anywidth[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    from anywidth.errors import AnywidthError

    try:
        app()
    except AnywidthError as error:
        print(f"anywidth: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        # Not a mistake in what was asked for: no permission, a full disk, a lost mount.
        where = f": {error.filename}" if error.filename else ""
        print(f"anywidth: {error.strerror or error}{where}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("anywidth: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
