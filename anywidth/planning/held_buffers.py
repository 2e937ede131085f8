"""The buffers of a network, restored after use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def buffers_restored(model: nn.Module, others: Sequence[Tensor] = ()) -> Iterator[None]:
    """Restore the buffers of a network, and other tensors, after a `with` block."""
    held = [(module, dict(module._buffers)) for module in model.modules()]
    tensors = [*model.buffers(), *others]
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.update(buffers)  # a forward may have assigned others
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                if tensor.shape != value.shape:  # an observer takes its size from what it sees
                    tensor.resize_(value.shape)
                tensor.copy_(value)
