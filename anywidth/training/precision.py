"""In which precision passes run: the faster dtype where nobody said, and tf32 where allowed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from anywidth.slimming.norm_statistics import buffers_kept

# Quicker passes are too short to tell apart, and have nothing to gain.
_SHORTEST_PASS = 0.02
# What bfloat16 must save to be worth its coarser numbers.
_WORTH_IT = 0.85
_REPEATS = 3


def faster_dtype(model: nn.Module, loss: Callable[[], Tensor]) -> torch.dtype | None:
    """bfloat16 where it is faster than what the parameters are in, None where it is not.

    On a GPU that computes in bfloat16 it is. On a CPU that does, a forward and backward pass is
    timed both ways: it depends on the network. Nothing is left behind in the network.

    Args:
        model: the network as it is trained, at the width that counts.
        loss: runs it on a batch.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters or any(parameter.dtype != torch.float32 for parameter in parameters):
        return None
    if all(parameter.is_cuda for parameter in parameters):
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_it else None
    if not _cpu_has_bfloat16():
        return None
    random_state = torch.get_rng_state()

    def seconds(in_bfloat16: bool) -> float:
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
            value = loss()
        torch.autograd.grad(value, parameters, allow_unused=True)
        return time.perf_counter() - started

    try:
        with buffers_kept(model):
            plain, short = [seconds(False)], [float("inf")]
            # In turns, so that whatever else the machine does slows down both.
            while len(short) <= _REPEATS and min(plain) >= _SHORTEST_PASS:
                short.append(seconds(True))
                plain.append(seconds(False))
            is_long = min(plain) >= _SHORTEST_PASS
            return torch.bfloat16 if is_long and min(short) < _WORTH_IT * min(plain) else None
    finally:
        torch.set_rng_state(random_state)


def _cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself, rather than by way of float32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


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
