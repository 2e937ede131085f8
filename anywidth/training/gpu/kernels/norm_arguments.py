"""The arguments of batch-norm kernels, and a norm that is left to the next convolution."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BatchNorm:
    """A batch norm in training and the activation after it.

    Args:
        weight: scale, with at least as many channels as the input; the first ones are used.
        bias: shift, of the same length as ``weight``.
        activation: one of :data:`anywidth.training.gpu.kernels.ACTIVATIONS`.
        running_mean: updated in place for the input's channels, as in PyTorch; None at a width
            that is not tracked.
        running_var: also updated, with the unbiased variance.
        num_batches_tracked: incremented by one, if given.
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
    """A norm and activation that the next kernel computes while it reads the tensor.

    Args:
        weight: the norm's weight, for its gradient.
        bias: the norm's bias, for its gradient.
        terms: mean, variance, inverse deviation, scale and shift per channel, one row each.
        activation: one of :data:`anywidth.training.gpu.kernels.ACTIVATIONS`.
    """

    weight: Tensor
    bias: Tensor
    terms: Tensor
    activation: str
