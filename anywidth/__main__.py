"""The command `anywidth`; `python -m anywidth`, and so `torchrun -m anywidth`, do the same."""

import os
import sys


def run() -> None:
    """Run the command line; Ctrl-C during the first imports ends it without a traceback."""
    import signal  # not before the working folder is left out

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # `nohup` ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from anywidth.app.cli import main

    main()


def leave_out_working_folder() -> None:
    """Import nothing from the working folder, which may be anyone's.

    `python -m` puts it first on the path. It stays if this package is in it: a clone.
    """
    here = os.getcwd()
    is_clone = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here
    if not sys.flags.safe_path and not is_clone and sys.path[:1] in ([here], [""]):
        del sys.path[0]


if __name__ == "__main__":
    leave_out_working_folder()
    run()
