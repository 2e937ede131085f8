"""Batch norm, a sum with another tensor and ReLU as one differentiable function, channels last.

The sum costs one more read where the norm is written, instead of passes of its own over its two
inputs and its output, and ReLU costs none. So it is with the gradient: where it is masked by the
output, it is written once for the other tensor, and the norm's sums are taken on the way.
"""

from typing import Any

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from anywidth.training.gpu.kernels.batch_norm_backward import input_gradient, parameter_gradients
from anywidth.training.gpu.kernels.batch_norm_forward import normalize_and_activate
from anywidth.training.gpu.kernels.norm_arguments import DeferredNorm


class _NormSum(torch.autograd.Function):
    """Saves its input and output, which other layers hold anyway."""

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(
        ctx: Any,
        x: Tensor,
        other: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        terms: Tensor,
        activation: str,
    ) -> Tensor:
        with torch.cuda.device_of(x):
            y = normalize_and_activate(x, terms, activation, other)
        ctx.save_for_backward(x, weight, bias, terms, *([y] if activation == "relu" else []))
        return y

    @staticmethod
    @once_differentiable
    @custom_bwd(device_type="cuda")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, terms, *activated = ctx.saved_tensors
        dz = dy = dy.contiguous(memory_format=torch.channels_last)
        masked = None
        if activated:
            dz = torch.empty_like(x, memory_format=torch.channels_last)
            masked = activated[0], dz
        with torch.cuda.device_of(x):
            weight_gradient, bias_gradient, corrections = parameter_gradients(
                x, dy, terms, weight, bias, "none", masked
            )
            x_gradient = None
            if ctx.needs_input_grad[0]:
                x_gradient = input_gradient(x, dz, terms, corrections, "none")
        other_gradient = dz if ctx.needs_input_grad[1] else None
        return x_gradient, other_gradient, weight_gradient, bias_gradient, None, None


def norm_and_sum(x: Tensor, norm: DeferredNorm, other: Tensor | None, activation: str) -> Tensor:
    """``x`` normalised, plus ``other`` if it is given, activated.

    Args:
        x: channels-last input of the norm.
        norm: what :func:`deferred_norm` made of ``x``, without an activation.
        other: a tensor of the same shape, dtype and memory.
        activation: ``"none"`` or ``"relu"``.
    """
    done: Tensor = _NormSum.apply(x, other, norm.weight, norm.bias, norm.terms, activation)
    return done
