"""In which precision passes run: bfloat16 on a GPU if asked for, and tf32 where allowed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


def dtype_by_device(model: nn.Module) -> torch.dtype | None:
    """bfloat16 for single precision on a GPU that computes in it; None, as it is, for others."""
    if all(one.is_cuda and one.dtype == torch.float32 for one in model.parameters()):
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_it else None
    return None


@contextlib.contextmanager
def tf32_arithmetic(allowed: bool) -> Iterator[None]:
    """Lets a GPU round what convolutions and linear layers read to 10 bits, or not."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    convolutions.allow_tf32 = products.allow_tf32 = allowed
    try:
        yield
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before
