"""Gradients of several passes added up where they are made, instead of returned and added later.

A step over several widths sums their gradients. Returned ones are as large as the full-width
parameter, mostly zeros at a narrow width; added in place, only the active part moves.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

_SUM = "_gradient_sum"


@contextlib.contextmanager
def gradients_added_to(
    parameters: Sequence[nn.Parameter], sums: Sequence[Tensor]
) -> Iterator[None]:
    """Within, kernels add the gradient of a parameter to its sum and return none for it."""
    for parameter, total in zip(parameters, sums, strict=True):
        setattr(parameter, _SUM, total)
    try:
        yield
    finally:
        for parameter in parameters:
            delattr(parameter, _SUM)


def gradient_sum(parameter: Tensor) -> Tensor | None:
    """Where the gradient of this parameter is to be added, or None if it is to be returned."""
    total: Tensor | None = getattr(parameter, _SUM, None)
    return total
