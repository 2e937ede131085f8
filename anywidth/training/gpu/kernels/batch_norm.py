"""Batch norm in training and its activation as one differentiable function."""

from typing import Any

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from anywidth.errors import AnywidthError
from anywidth.training.gpu.kernels.batch_norm_backward import input_gradient, parameter_gradients
from anywidth.training.gpu.kernels.batch_norm_forward import (
    batch_terms,
    merged_terms,
    normalize_and_activate,
)
from anywidth.training.gpu.kernels.batch_norm_small import (
    has_few_pixels,
    small_backward,
    small_forward,
)
from anywidth.training.gpu.kernels.eligibility import obstacle_to_batch_norm_act
from anywidth.training.gpu.kernels.norm_arguments import BatchNorm, DeferredNorm


class _BatchNormAct(torch.autograd.Function):
    """Saves only the input and a few numbers per channel for the backward pass."""

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: BatchNorm,
        partial: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.cuda.device_of(x):
            if has_few_pixels(x):
                y, terms = small_forward(x, norm)
            else:
                terms = _terms(x, norm, partial)
                y = normalize_and_activate(x, terms, norm.activation)
        ctx.save_for_backward(x, weight, bias, terms)
        ctx.activation = norm.activation
        ctx.set_materialize_grads(False)
        mean, variance = terms[0], terms[1]
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    @once_differentiable
    @custom_bwd(device_type="cuda")
    def backward(  # type: ignore[override]
        ctx: Any, dy: Tensor | None, *unused: None
    ) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 5
        x, weight, bias, terms = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        x_gradient: Tensor | None = None
        if has_few_pixels(x):
            x_gradient, weight_gradient, bias_gradient = small_backward(
                x, dy, terms, weight, bias, ctx.activation
            )
        else:
            weight_gradient, bias_gradient, corrections = parameter_gradients(
                x, dy, terms, weight, bias, ctx.activation
            )
            if ctx.needs_input_grad[0]:
                x_gradient = input_gradient(x, dy, terms, corrections, ctx.activation)
        return x_gradient, weight_gradient, bias_gradient, None, None


def _terms(x: Tensor, norm: BatchNorm, partial: Tensor | None) -> Tensor:
    if partial is None:
        return batch_terms(x, norm)
    return merged_terms(partial, x.numel() // x.shape[1], norm)


def batch_norm_act(x: Tensor, norm: BatchNorm, partial: Tensor | None = None) -> Tensor:
    """Normalise ``x`` by the statistics of this batch, then activate it.

    Args:
        x: channels-last input, more than one value per channel.
        norm: the norm and activation.
        partial: statistics of parts of ``x``, if the kernel that wrote it computed them; saves a
            pass over ``x``.
    """
    output, _, _ = batch_norm_act_with_statistics(x, norm, partial)
    return output


def batch_norm_act_with_statistics(
    x: Tensor, norm: BatchNorm, partial: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`batch_norm_act`, with the batch's mean and (biased) variance for calibration.

    Both are float32 and have no gradient.
    """
    _check(x, norm)
    # Parameters are passed separately, because autograd only looks at the arguments.
    y, mean, variance = _BatchNormAct.apply(x, norm.weight, norm.bias, norm, partial)
    _count_writes(norm)
    return y, mean, variance


def deferred_norm(x: Tensor, norm: BatchNorm, partial: Tensor | None = None) -> DeferredNorm:
    """Only the statistics of :func:`batch_norm_act`: a convolution does the rest.

    Pass the result to :func:`depthwise_conv2d_with_statistics` together with ``x``. The normalised
    tensor is never written or read.
    """
    _check(x, norm)
    with torch.cuda.device_of(x):
        terms = _terms(x, norm, partial)
    _count_writes(norm)
    return DeferredNorm(norm.weight, norm.bias, terms, norm.activation)


def _count_writes(norm: BatchNorm) -> None:
    """Tell PyTorch that the running statistics have changed, which it cannot see."""
    written = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    torch.autograd.graph.increment_version([t for t in written if t is not None])


def _check(x: Tensor, norm: BatchNorm) -> None:
    obstacle = obstacle_to_batch_norm_act(x, norm)
    if obstacle is not None:
        raise AnywidthError(
            f"batch_norm_act: {obstacle}. Ask supports_batch_norm_act first and "
            "fall back to torch.nn.functional.batch_norm."
        )
