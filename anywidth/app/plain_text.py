"""Text for a terminal: names of files and classes may be anyone's, and hold any character."""

from __future__ import annotations

import re
import sys
import unicodedata

# They make text read in another order than it is written.
_TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def in_one_line(text: str) -> str:
    """Without line breaks; other spaces stay, because a quoted path may have several."""
    return re.sub(r"\s*[\r\n]+\s*", " ", text).strip()


def visible(text: str) -> str:
    """Without control characters, which would move the cursor or retitle the window."""
    return "".join(map(_visible, text))


def _visible(one: str) -> str:
    is_control = unicodedata.category(one) in ("Cc", "Cs") and one not in "\n\t"
    return one.encode("unicode_escape").decode() if is_control or one in _TURNING else one


def write_anything() -> None:
    """Characters that the terminal's encoding lacks are shown as escapes, not as an exception."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
