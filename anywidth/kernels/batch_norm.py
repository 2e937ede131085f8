"""Batch norm in training and its activation as one differentiable function."""

from typing import Any

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from anywidth.errors import AnywidthError
from anywidth.kernels.batch_norm_backward import input_gradient, parameter_gradients
from anywidth.kernels.batch_norm_forward import batch_terms, merged_terms, normalize_and_activate
from anywidth.kernels.batch_norm_small import is_small, small_backward, small_forward
from anywidth.kernels.deferred import DeferredNorm
from anywidth.kernels.eligibility import obstacle_to_batch_norm_act


class _BatchNormAct(torch.autograd.Function):
    """Keeps the input and a few numbers a channel for the backward pass, nothing else."""

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        activation: str,
        num_batches_tracked: Tensor | None,
        partial: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.cuda.device_of(x):
            running = (running_mean, running_var, num_batches_tracked)
            if is_small(x):
                y, terms = small_forward(x, weight, bias, *running, momentum, eps, activation)
            else:
                terms = _terms(x, weight, bias, *running, momentum, eps, partial)
                y = normalize_and_activate(x, terms, activation)
        ctx.save_for_backward(x, weight, bias, terms)
        ctx.activation = activation
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
            return (None,) * 10
        x, weight, bias, terms = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        x_gradient: Tensor | None = None
        if is_small(x):
            x_gradient, weight_gradient, bias_gradient = small_backward(
                x, dy, terms, weight, bias, ctx.activation
            )
        else:
            weight_gradient, bias_gradient, corrections = parameter_gradients(
                x, dy, terms, weight, bias, ctx.activation
            )
            if ctx.needs_input_grad[0]:
                x_gradient = input_gradient(x, dy, terms, corrections, ctx.activation)
        return x_gradient, weight_gradient, bias_gradient, *(None,) * 7


def _terms(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float,
    eps: float,
    partial: Tensor | None,
) -> Tensor:
    running = (running_mean, running_var, num_batches_tracked)
    if partial is None:
        return batch_terms(x, weight, bias, *running, momentum, eps)
    pixels = x.numel() // x.shape[1]
    return merged_terms(partial, pixels, weight, bias, *running, momentum, eps)


def batch_norm_act_with_statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    activation: str,
    num_batches_tracked: Tensor | None = None,
    partial: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`anywidth.kernels.batch_norm_act_with_statistics`."""
    _check(x, weight, bias, running_mean, running_var, activation)
    running = (running_mean, running_var, momentum, eps, activation, num_batches_tracked)
    y, mean, variance = _BatchNormAct.apply(x, weight, bias, *running, partial)
    return y, mean, variance


def deferred_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    activation: str,
    num_batches_tracked: Tensor | None = None,
    partial: Tensor | None = None,
) -> DeferredNorm:
    """See :func:`anywidth.kernels.deferred_norm`."""
    _check(x, weight, bias, running_mean, running_var, activation)
    running = (running_mean, running_var, num_batches_tracked)
    with torch.cuda.device_of(x):
        terms = _terms(x, weight, bias, *running, momentum, eps, partial)
    return DeferredNorm(weight, bias, terms, activation)


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    activation: str,
) -> None:
    obstacle = obstacle_to_batch_norm_act(x, weight, bias, running_mean, running_var, activation)
    if obstacle is not None:
        raise AnywidthError(
            f"batch_norm_act: {obstacle}. Ask supports_batch_norm_act first and "
            "fall back to torch.nn.functional.batch_norm."
        )
