"""Training and evaluation mode, put back after use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """After a `with` block each module is in training or evaluation mode as it was before."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside a `with` block; after it each module is in the mode it was in."""
    with modes_kept(model):
        model.eval()
        yield
