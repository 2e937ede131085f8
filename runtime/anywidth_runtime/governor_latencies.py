"""How long each width takes, updated while a network serves."""

from __future__ import annotations

import math
from collections.abc import Mapping

from anywidth_runtime.contents import Width
from anywidth_runtime.errors import RequestError

# The share of the newest measurement in a running mean: of the machine, and of one width.
_MACHINE_SHARE = 0.1
_WIDTH_SHARE = 0.02
# A measurement counts as at most this many times the expected time, because an interrupted run says
# little about the next one.
_LARGEST_SURPRISE = 2.0
# Seconds between two runs that are normal for a busy interpreter.
_SLOW_PYTHON = 0.002
# The reserve covers this share of all runs.
_COVERED = 0.999
# How far one surprise moves the reserve, as a share of the widest width's time.
_RESERVE_STEP = 0.1


class Latencies:
    """A table of seconds per width, corrected by every run that is noted.

    Four values are learned. Other work on the machine slows all widths by about one factor, which
    adapts quickly. The factor of a single width adapts slowly. The overhead is the time between two
    runs and does not depend on the width. The reserve is how much longer than expected a run may
    take: it follows the 0.999 quantile of the excess, which covers events that a mean does not
    show, such as a run interrupted by another process.

    Args:
        milliseconds: width → measured time.
    """

    def __init__(self, milliseconds: Mapping[Width, float]) -> None:
        if not milliseconds:
            raise RequestError("no latencies: expected milliseconds for at least one width")
        for width, value in milliseconds.items():
            if not (math.isfinite(value) and value > 0):
                raise RequestError(
                    f"width {width!r} takes {value!r} ms: expected a number above 0; measure it "
                    "with net.measure()"
                )
        self._measured = {width: value / 1000 for width, value in milliseconds.items()}
        self._bias = dict.fromkeys(self._measured, 1.0)
        self._step = _RESERVE_STEP * max(self._measured.values())
        self._most_overhead = max(min(self._measured.values()), _SLOW_PYTHON)
        self.slowdown = 1.0
        self.overhead = 0.0
        self.reserve = 0.0

    def run(self, width: Width) -> float:
        """The expected duration of the next run at a width, in seconds."""
        return self._measured[width] * self._bias[width] * self.slowdown

    def expected(self, width: Width, size: float = 1.0) -> float:
        """Seconds for which the next request keeps a worker busy."""
        return self.run(width) * size + self.overhead

    def note(self, width: Width, seconds: float, overhead: float = 0.0) -> None:
        """Update from a run that has ended, and from the overhead before it."""
        run, expected = self.run(width), self.expected(width)
        surprise = min(max(seconds / run, 1 / _LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self.slowdown *= 1 + _MACHINE_SHARE * (surprise - 1)
        self._bias[width] *= 1 + _WIDTH_SHARE * (surprise - 1)
        is_longer = seconds + overhead > expected + self.reserve
        # A longer time was an interruption, which the reserve covers.
        self.overhead += _MACHINE_SHARE * (min(overhead, self._most_overhead) - self.overhead)
        # Stochastic approximation of a quantile: up by 0.999 of a step, down by 0.001 of one.
        self.reserve = max(0.0, self.reserve + self._step * (is_longer - (1 - _COVERED)))
