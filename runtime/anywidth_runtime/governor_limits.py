"""Limits of a governor: heat or energy, and flicker."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from anywidth_runtime.errors import RequestError

_log = logging.getLogger("anywidth_runtime")

# The meter must read this much below its limit before a wider width is allowed again.
_COOL = 0.05


class Ceiling:
    """Allows narrower widths only while a meter reads above its limit.

    The meter is read every `every_ms`. Above the limit, the widest allowed width goes down by one
    on the governor's menu; more than 5 % below the limit, it goes up by one.

    Args:
        meter: returns the value that must stay below the limit, such as watts, degrees or joules
            per minute. It is called between two requests and should return immediately. If it
            fails, this counts as above the limit, because a narrower width is always safe.
        limit: the largest allowed reading.
        every_ms: milliseconds between two readings.

    Example:
        Ceiling(lambda: int(Path("/sys/class/thermal/thermal_zone0/temp").read_text()) / 1000, 80)
    """

    def __init__(
        self, meter: Callable[[], float], limit: float, *, every_ms: float = 1000.0
    ) -> None:
        if not (math.isfinite(limit) and limit > 0):
            raise RequestError(f"limit={limit!r}: expected a number above 0, in the meter's unit")
        if not every_ms > 0:
            raise RequestError(f"every_ms={every_ms!r}: expected milliseconds above 0")
        self._meter = meter
        self._limit = limit
        self._every = every_ms / 1000
        self._next = -math.inf
        self._lowered = 0
        self._is_failing = False

    def highest(self, now: float, count: int) -> int:
        """The last allowed position on a menu of `count` widths."""
        if now >= self._next:
            self._next = now + self._every
            reading = self._read()
            if not reading <= self._limit:
                self._lowered = min(self._lowered + 1, count - 1)
            elif reading < (1 - _COOL) * self._limit:
                self._lowered = max(self._lowered - 1, 0)
        return count - 1 - self._lowered

    def _read(self) -> float:
        try:
            reading = float(self._meter())
        except Exception:
            if not self._is_failing:
                _log.exception(
                    "the governor's meter failed; widths become narrower until it works again"
                )
            self._is_failing = True
            return math.inf
        self._is_failing = False
        return reading


class Steadiness:
    """Prevents flicker: narrower immediately, wider only if there is time to spare.

    Args:
        hysteresis: share of a wider width's time that must be to spare.
        hold_ms: how long wider widths must have fitted without interruption.
    """

    def __init__(self, hysteresis: float = 0.0, hold_ms: float = 0.0) -> None:
        if not (0 <= hysteresis < math.inf):
            raise RequestError(
                f"hysteresis={hysteresis!r}: expected a share of at least 0, such as 0.1"
            )
        if not (0 <= hold_ms < math.inf):
            raise RequestError(f"hold_ms={hold_ms!r}: expected milliseconds, not below 0")
        self._hysteresis = hysteresis
        self._hold = hold_ms / 1000
        self._place: int | None = None
        self._fits_since: float | None = None

    def settle(self, fits: Callable[[float], int], now: float) -> int:
        """The position on the menu to use.

        Args:
            fits: (share to spare) → the last position on the menu that fits with it.
            now: the current time in seconds.
        """
        widest = fits(0.0)
        before = self._place
        if before is None or widest <= before:
            self._fits_since = None
            self._place = widest
            return widest
        wider = max(before, fits(self._hysteresis))
        if wider == before:
            self._fits_since = None
            return before
        if self._fits_since is None:
            self._fits_since = now
        if now - self._fits_since >= self._hold:
            self._place = wider
            self._fits_since = None
        return self._place if self._place is not None else wider
