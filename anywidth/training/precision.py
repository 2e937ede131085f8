"""The precision of passes: bfloat16 on a GPU if asked for, and tf32 if allowed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


def dtype_by_device(model: nn.Module) -> torch.dtype | None:
    """bfloat16 for float32 networks on a GPU that supports it; else None (no change)."""
    if all(one.is_cuda and one.dtype == torch.float32 for one in model.parameters()):
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_it else None
    return None


@contextlib.contextmanager
def tf32_arithmetic(allowed: bool) -> Iterator[None]:
    """Allow or forbid tf32, which rounds inputs of convolutions and linear layers to 10 bits."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    convolutions.allow_tf32 = products.allow_tf32 = allowed
    try:
        yield
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before
