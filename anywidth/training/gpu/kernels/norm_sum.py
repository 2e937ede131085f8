"""Batch norm, a sum with another tensor and ReLU as one differentiable function, channels last.

The sum costs one more read where the norm is written, instead of passes of its own over its two
inputs and its output, and ReLU costs none. So it is with the gradient: where it is masked by the
output, it is written once for the other tensor, and the norm's sums are taken on the way.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from anywidth.training.gpu.kernels.activations import activate
from anywidth.training.gpu.kernels.batch_norm_backward import (
    finish_parameter_gradients,
    input_gradient,
    parameter_gradients,
)
from anywidth.training.gpu.kernels.batch_norm_forward import normalize_and_activate
from anywidth.training.gpu.kernels.batch_norm_layout import Layout, columns_of_block
from anywidth.training.gpu.kernels.compilation import compile_once
from anywidth.training.gpu.kernels.norm_arguments import DeferredNorm

_FORWARD_ROWS = 64
_FORWARD_PROGRAMS = 16
_BACKWARD_ROWS = 32
_BACKWARD_PROGRAMS = 4


@compile_once
def norm_sum_kernel(
    x_ptr: tl.tensor,
    other_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    y_ptr: tl.tensor,
    pixels: int,
    channels: int,
    folds: int,
    rows: int,
    blocks: int,
    parts: int,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Normalise, add and activate, from the last rows up: those are still in the cache."""
    part = tl.program_id(0) // blocks
    column, channel, pixel = columns_of_block(tl.program_id(0) % blocks, channels, COLUMNS, ALIGNED)
    length = folds * pixel
    mean = tl.load(terms_ptr + channel)[None, :]
    scale = tl.load(terms_ptr + 3 * pixel + channel)[None, :]
    shift = tl.load(terms_ptr + 4 * pixel + channel)[None, :]
    for start in range(part * ROWS, rows, parts * ROWS):
        row = rows - 1 - start - tl.arange(0, ROWS)
        offset = row[:, None] * length + column[None, :]
        inside = (row >= 0)[:, None] & (column < length)[None, :] & (offset < pixels * pixel)
        value = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(other_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        value = activate((value - mean) * scale + shift + other, ACTIVATION)
        tl.store(y_ptr + offset, value.to(y_ptr.dtype.element_ty), mask=inside)


@compile_once
def masked_sum_kernel(
    x_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    y_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    dz_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    pixels: int,
    channels: int,
    folds: int,
    rows: int,
    blocks: int,
    parts: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Write the gradient before ReLU, ``dz``, and the sums of ``dz`` and ``dz * (x - mean)``."""
    part = tl.program_id(0) // blocks
    column, channel, pixel = columns_of_block(tl.program_id(0) % blocks, channels, COLUMNS, ALIGNED)
    length = folds * pixel
    mean = tl.load(terms_ptr + channel)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(part * ROWS, rows, parts * ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None] * length + column[None, :]
        inside = (column < length)[None, :] & (offset < pixels * pixel)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0)
        y = tl.load(y_ptr + offset, mask=inside, other=0.0)
        dz = tl.where(y <= 0, 0.0, dy.to(tl.float32))
        tl.store(dz_ptr + offset, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        sums += dz
        products += dz * (x - mean)
    offset = part * length + column
    tl.store(partial_ptr + offset, tl.sum(sums, axis=0), mask=column < length)
    tl.store(partial_ptr + parts * length + offset, tl.sum(products, axis=0), mask=column < length)


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
            if other is None:
                y = normalize_and_activate(x, terms, activation)
            else:
                y = _added(x, other, terms, activation)
        ctx.save_for_backward(x, weight, bias, terms, *([y] if activation == "relu" else []))
        return y

    @staticmethod
    @once_differentiable
    @custom_bwd(device_type="cuda")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, terms, *activated = ctx.saved_tensors
        dz = dy = dy.contiguous(memory_format=torch.channels_last)
        with torch.cuda.device_of(x):
            if activated:
                dz, partial, pixels = masked_gradient(x, dy, activated[0], terms)
                found = finish_parameter_gradients(partial, pixels, terms, weight, bias)
            else:
                found = parameter_gradients(x, dy, terms, weight, bias, "none")
            weight_gradient, bias_gradient, corrections = found
            x_gradient = None
            if ctx.needs_input_grad[0]:
                x_gradient = input_gradient(x, dz, terms, corrections, "none")
        other_gradient = dz if ctx.needs_input_grad[1] else None
        return x_gradient, other_gradient, weight_gradient, bias_gradient, None, None


def _added(x: Tensor, other: Tensor, terms: Tensor, activation: str) -> Tensor:
    layout = Layout.of(x)
    parts = layout.parts(_FORWARD_ROWS, _FORWARD_PROGRAMS)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    norm_sum_kernel[(layout.blocks * parts,)](
        *(x, other, terms, y),
        *layout.sizes(parts),
        ACTIVATION=activation,
        **layout.constants(_FORWARD_ROWS),
    )
    return y


def masked_gradient(x: Tensor, dy: Tensor, y: Tensor, terms: Tensor) -> tuple[Tensor, Tensor, int]:
    """The gradient before ReLU, partial sums for the norm's parameters, and the pixels."""
    layout = Layout.of(x)
    parts = layout.parts(_BACKWARD_ROWS, _BACKWARD_PROGRAMS)
    dz = torch.empty_like(x, memory_format=torch.channels_last)
    partial = torch.empty(
        (2, parts * layout.folds, layout.channels), dtype=torch.float32, device=x.device
    )
    masked_sum_kernel[(layout.blocks * parts,)](
        *(x, dy, y, terms, dz, partial),
        *layout.sizes(parts),
        **layout.constants(_BACKWARD_ROWS),
    )
    return dz, partial, layout.pixels


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
