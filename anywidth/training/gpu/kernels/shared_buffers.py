"""Buffers that the passes of one step share: sums of gradients, and weights cast once for all.

A step over several widths sums their gradients. Returned ones are as large as the full-width
parameter, mostly zeros at a narrow width; added in place, only the active part moves. Likewise a
weight is cast to the dtype of the passes once a step, not once a width.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

_SUM = "_gradient_sum"
_CAST = "_cast_weight"


def gradients_added_to(
    parameters: Sequence[Tensor], sums: Sequence[Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Within, kernels add the gradient of a parameter to its sum and return none for it.

    Sums are dense, contiguous or channels-last.
    """
    return _attached(_SUM, parameters, sums)


def gradient_sum(parameter: Tensor) -> Tensor | None:
    """Where the gradient of this parameter is to be added, or None if it is to be returned."""
    total: Tensor | None = getattr(parameter, _SUM, None)
    if total is not None:
        mark_used(total)
    return total


def mark_used(total: Tensor) -> None:
    """A sum that nothing was ever added to is no gradient of zero: weight decay would act on it."""
    total.__dict__["_is_used"] = True


def is_used(total: Tensor) -> bool:
    return "_is_used" in total.__dict__


def weights_cast_to(
    parameters: Sequence[Tensor], casts: Sequence[Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Within, layers read these copies in another dtype instead of the parameters."""
    return _attached(_CAST, parameters, casts)


def cast_weight(parameter: Tensor) -> Tensor:
    """The copy of a parameter that was cast for this step, or the parameter itself."""
    cast: Tensor = getattr(parameter, _CAST, parameter)
    return cast


@contextlib.contextmanager
def _attached(name: str, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> Iterator[None]:
    for parameter, buffer in zip(parameters, buffers, strict=True):
        setattr(parameter, name, buffer)
    try:
        yield
    finally:
        for parameter in parameters:
            delattr(parameter, name)
