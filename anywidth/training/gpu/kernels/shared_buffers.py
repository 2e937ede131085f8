"""Buffers that the passes of one step share: sums of gradients, and cast weights.

A step over several widths sums their gradients. Returned gradients would be as large as the
full-width parameter and mostly zero at a narrow width; adding in place moves only the active part.
Likewise a weight is cast to the dtype of the passes once per step, not once per width.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

_SUM = "_gradient_sum"
_CAST = "_cast_weight"


def gradients_added_to(
    parameters: Sequence[Tensor], sums: Sequence[Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Inside this context, kernels add the gradient of a parameter to its sum and return none.

    Sums are dense, contiguous or channels-last.
    """
    return _attached(_SUM, parameters, sums)


def gradient_sum(parameter: Tensor) -> Tensor | None:
    """The sum to add the gradient of this parameter to, or None if it is returned."""
    total: Tensor | None = getattr(parameter, _SUM, None)
    if total is not None:
        mark_used(total)
    return total


def mark_used(total: Tensor) -> None:
    """Mark a sum as used. An unused sum is no gradient of zero: weight decay would act on it."""
    total.__dict__["_is_used"] = True


def is_used(total: Tensor) -> bool:
    return "_is_used" in total.__dict__


def weights_cast_to(
    parameters: Sequence[Tensor], casts: Sequence[Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Inside this context, layers read cast copies instead of the parameters."""
    return _attached(_CAST, parameters, casts)


def cast_weight(parameter: Tensor) -> Tensor:
    """The cast copy of a parameter for this step, or the parameter itself."""
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
