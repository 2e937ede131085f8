"""The data that a finished classifier keeps beside its weights: classes, input, normalisation."""

from __future__ import annotations

from typing import Any

from anywidth.app.runs.run import MEND, Run
from anywidth.errors import AnywidthError
from anywidth.json_values import listed, number, refuse, row, text, whole

# More would not be made in any memory.
_MOST_PIXELS, _MOST_CHANNELS = 2**14, 2**10


def _positive(value: Any, at: str) -> float:
    found = number(value, at)
    return found if found > 0 else refuse(at, value, "a number above 0")


_SIDE = whole(1, _MOST_PIXELS)
_FIELDS = {
    "classes": listed(text),
    "input_shape": row(whole(1, _MOST_CHANNELS), _SIDE, _SIDE),
    "mean": listed(number),
    "std": listed(_positive),
}


def read_state(run: Run) -> dict[str, Any]:
    """`classes`, `input_shape`, `mean` and `std` of a finished run, which may be anyone's."""
    found = run.read_state(_FIELDS)
    channels = found["input_shape"][0]
    if not found["classes"] or not len(found["mean"]) == len(found["std"]) == channels:
        raise AnywidthError(
            f"{run.folder / 'finished.json'}: {len(found['classes'])} classes, and "
            f"{len(found['mean'])} means and {len(found['std'])} deviations for {channels} "
            f"channels; {MEND}"
        )
    return found
