"""Training and evaluation mode, restored after use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of every module after a `with` block."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside a `with` block; afterwards every module has its old mode."""
    with modes_kept(model):
        model.eval()
        yield
