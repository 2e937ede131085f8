"""A batch norm that is done by the convolution after it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeferredNorm:
    """What normalises and activates a tensor, to be done while it is read.

    Args:
        weight: the norm's parameter, for its gradient.
        bias: likewise.
        terms: mean, variance, inverse deviation, scale and shift of each channel, a row each.
        activation: one of :data:`anywidth.kernels.ACTIVATIONS`.
    """

    weight: Tensor
    bias: Tensor
    terms: Tensor
    activation: str
