"""How a launch is divided into programs: plain integers, free to change with the width."""

from functools import cache

import torch

# The largest number of copies of the channel axis in one block.
_FOLDS = (1, 2, 4, 8)
_WELL_FILLED = 0.9


def ceil_divide(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


@cache
def choose_folds(units: int, block: int) -> int:
    """The number of pixels that share a row of a block, so that few channels still fill it.

    In channels-last memory ``folds`` neighbouring pixels of ``units`` channels are one row of
    ``folds * units``. The result is the smallest number that fills blocks to 90 %, or the best.
    """

    def filled(folds: int) -> float:
        return folds * units / (ceil_divide(folds * units, block) * block)

    for folds in _FOLDS:
        if filled(folds) >= _WELL_FILLED:
            return folds
    return max(_FOLDS, key=filled)


def choose_strips(programs: int, rows: int, shortest: int, wanted: int) -> int:
    """The number of strips, of at least ``shortest`` rows, that keeps the device busy."""
    return max(1, min(ceil_divide(wanted, programs), rows // shortest))


def choose_parts(blocks: int, steps: int, wanted: int) -> int:
    """The number of partial sums of a reduction with ``steps`` steps per block."""
    return max(1, min(steps, wanted // blocks))


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; the interpreter counts as one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
