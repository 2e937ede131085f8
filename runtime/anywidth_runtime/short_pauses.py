"""Keep Python's own pauses shorter than a narrow width takes."""

from __future__ import annotations

import gc
import sys

# Longest time in seconds that a thread may hold the interpreter lock: the default of 5 ms would
# delay narrow widths by several times their own time.
_SWITCH_INTERVAL = 0.0005


def shorten_pauses() -> None:
    """Call this once, when everything is loaded and before requests come.

    Threads take turns more often, and the garbage collector no longer looks through what was loaded
    so far. A full collection stops all threads, and its time grows with all that was imported.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()
