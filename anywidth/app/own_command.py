"""How the user can call this program again."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "anywidth"


def own_command(*arguments: object) -> str:
    """A command line to copy: with the path of this program if the shell would not find it.

    A `Path` is never read as an option, whatever its name is.
    """
    program = Path(sys.argv[0])
    found = shutil.which(NAME)
    is_found = found is not None and program.exists() and Path(found).samefile(program)
    named = NAME if program.name != NAME or is_found else str(program)
    return " ".join(map(_quoted, (named, *arguments)))


def _quoted(argument: object) -> str:
    text = str(argument)
    if isinstance(argument, Path) and text.startswith("-"):
        text = f"./{text}"
    if text.isprintable():
        return shlex.quote(text)
    # Line breaks and undecodable bytes: the quotes of bash and zsh keep the command in one line.
    known = {ord("\\"): "\\\\", ord("'"): "\\'"}
    shown = (chr(b) if 32 <= b < 127 else f"\\x{b:02x}" for b in os.fsencode(text))
    return "$'" + "".join(known.get(ord(one), one) if len(one) == 1 else one for one in shown) + "'"
