"""Lists of widths for the command line and for spectra."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal

from anywidth.errors import AnywidthError

_MOST_WIDTHS = 10_000


def parse_widths(text: str, others: str = "") -> list[float]:
    """Widths from a command line: `0.5`, `0.25,0.5,1.0`, or `0.25:1.0:0.025` (both ends included).

    Commas may join ranges and numbers. Steps are taken in decimals, so 0.3 is 0.3. `others` is
    added to the error message: other values that the command takes, such as ", or `every`".
    """
    widths: list[float] = []
    try:
        for part in text.split(","):
            numbers = [Decimal(number.strip()) for number in part.split(":")]
            widths += map(float, numbers if len(numbers) == 1 else _steps(*numbers))
    except (ArithmeticError, TypeError, ValueError) as error:
        reason = f" ({error})" if type(error) is ValueError else ""
        raise AnywidthError(
            f"widths {text!r} cannot be read{reason}: expected a number such as 0.5, a list such "
            f"as 0.25,0.5,1.0, or start:stop:step such as 0.25:1.0:0.025{others}"
        ) from error
    for width in widths:
        if not 0 < width <= 1:
            raise AnywidthError(
                f"width {width} in {text!r}: a width is in (0, 1], a fraction of the full width"
            )
    return list(dict.fromkeys(widths))


def spectrum_widths(low: float, high: float, step: float = 0.025) -> list[float]:
    """From `low` in equal steps, and `high`, even if no step ends there."""
    steps = math.ceil((high - low) / step - 1e-9)
    return [*(round(low + i * step, 6) for i in range(steps)), high]


def _steps(start: Decimal, stop: Decimal, step: Decimal) -> Iterator[Decimal]:
    if not start.is_finite() or not stop.is_finite() or not step.is_finite():
        raise ValueError("not a number")
    if step <= 0 or start > stop:
        raise ValueError("start must not exceed stop, and step must be above 0")
    steps = (stop - start) / step
    if steps >= _MOST_WIDTHS:
        raise ValueError(f"more than {_MOST_WIDTHS} widths")
    return (start + index * step for index in range(int(steps) + 1))
