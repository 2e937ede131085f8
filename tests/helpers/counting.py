"""Multiply-adds as torch counts them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def counted(model: nn.Module, *inputs: Tensor) -> int:
    """Half of torch's count, with attention as the products that it counts."""
    counter = FlopCounterMode(display=False)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model.eval()(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() // 2
