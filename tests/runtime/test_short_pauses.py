"""What was loaded before requests come is not searched for garbage again."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, sys
from anywidth_runtime.short_pauses import shorten_pauses

loaded = [[number] for number in range(1000)]
loop = []
loop.append(loop)
del loop
shorten_pauses()
assert sys.getswitchinterval() < 0.001
assert gc.get_freeze_count() > 1000
looked_through = {id(one) for one in gc.get_objects()}
assert not any(id(one) in looked_through for one in loaded)
assert gc.isenabled()
"""


def test_the_collector_leaves_alone_what_was_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
