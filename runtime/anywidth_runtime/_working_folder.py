"""`python -m anywidth_runtime` imports nothing from the working folder, which may be anyone's.

Python puts that folder first on the path. It stays if this package is in it: a clone.
"""

# Only what Python has loaded before it looks at the path.
import os
import sys

_IS_COMMAND = sys.argv[:1] == ["-m"]  # what Python sets while it looks for the module to run
_CLONE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if _IS_COMMAND and not sys.flags.safe_path and sys.path[:1] not in ([], [_CLONE]):
    del sys.path[0]
