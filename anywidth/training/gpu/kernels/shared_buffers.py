"""Buffers that the passes of one step share: sums of gradients, and cast weights.

A step over several widths sums their gradients. Returned gradients would be as large as the
full-width parameter and mostly zero at a narrow width; adding in place moves only the active part.
Likewise a weight is cast to the dtype of the passes once per step, not once per width.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_SUM = "_gradient_sum"
_CAST = "_cast_weight"


@contextlib.contextmanager
def gradients_added_to(
    parameters: Sequence[Tensor], sums: Sequence[Tensor]
) -> Iterator[list[Tensor]]:
    """Inside this context, kernels add the gradient of a parameter to its sum and return none.

    Sums are dense, contiguous or channels-last. The list that it gives grows by each sum to which
    something was added: a parameter that took no part has no gradient, not one of zero, on which
    weight decay would act.
    """
    used: list[Tensor] = []
    with _attached(_SUM, parameters, [(total, used) for total in sums]):
        yield used


def gradient_sum(parameter: Tensor) -> Tensor | None:
    """The sum to add the gradient of this parameter to, or None if it is returned."""
    held: tuple[Tensor, list[Tensor]] | None = getattr(parameter, _SUM, None)
    if held is None:
        return None
    total, used = held
    used.append(total)
    return total


def added_to_sum(weight: Tensor, found: Tensor) -> Tensor | None:
    """Add the gradient of the first filters and channels of a pointwise convolution to its sum.

    Without a sum it is returned, in the shape of the weight.
    """
    total = gradient_sum(weight)
    gradient = torch.zeros_like(weight) if total is None else total
    gradient[: found.shape[0], : found.shape[1], 0, 0] += found
    return gradient if total is None else None


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
def _attached(name: str, parameters: Sequence[Tensor], values: Sequence[Any]) -> Iterator[None]:
    for parameter, value in zip(parameters, values, strict=True):
        setattr(parameter, name, value)
    try:
        yield
    finally:
        for parameter in parameters:
            delattr(parameter, name)
