"""A batch norm as its kernels take it, and one that is left to the convolution after it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BatchNorm:
    """A batch norm in training and the activation after it.

    Args:
        weight: scale of at least as many channels as the input has; the first ones are used.
        bias: shift, as long as ``weight``.
        activation: one of :data:`anywidth.training.gpu.kernels.ACTIVATIONS`.
        running_mean: updated in place over the input's channels as PyTorch does, or None at a
            width that is not tracked.
        running_var: likewise, with the unbiased variance.
        num_batches_tracked: counted up by one, if given.
        momentum: weight of a batch in the running statistics.
        eps: added to the variance.
    """

    weight: Tensor
    bias: Tensor
    activation: str = "none"
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    num_batches_tracked: Tensor | None = None
    momentum: float = 0.1
    eps: float = 1e-5


@dataclass(frozen=True)
class DeferredNorm:
    """What normalises and activates a tensor, to be done while it is read.

    Args:
        weight: the norm's parameter, for its gradient.
        bias: likewise.
        terms: mean, variance, inverse deviation, scale and shift of each channel, a row each.
        activation: one of :data:`anywidth.training.gpu.kernels.ACTIVATIONS`.
    """

    weight: Tensor
    bias: Tensor
    terms: Tensor
    activation: str
