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


class TrainingModes:
    """Puts a model in training mode; modules that its user has frozen stay in evaluation mode.

    `model.eval()` for a validation forgets which modules those are, so they are noted here.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._frozen: list[nn.Module] = []
        if model.training:
            self._note()

    def _note(self) -> None:
        self._frozen = [module for module in self.model.modules() if not module.training]

    def restore(self) -> None:
        """Training mode, if every module is in evaluation mode; otherwise modes stay."""
        if self.model.training:
            self._note()
        elif not any(module.training for module in self.model.modules()):
            self.model.train()
            for module in self._frozen:
                module.training = False
