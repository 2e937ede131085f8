"""How a search judges a run's network: never by the images that its results are measured on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from anywidth.searching.judging import Evaluate


@dataclass(frozen=True)
class Judging:
    """What `Trained.judging` returns.

    Args:
        evaluate: the metrics of the network as it is set; each rank calls it on its own.
        metric: the one to search by.
        judged_on: what the network is judged on, in words.
        is_held_out: whether the network was never trained with it.
        calibration: training batches for batch norm; None for a network without.
    """

    evaluate: Evaluate
    metric: str
    judged_on: str
    is_held_out: bool
    calibration: Iterable[Any] | None = None
