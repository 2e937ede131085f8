"""What a network of any source must answer with, to be trained as a classifier."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError


def check_logits(model: nn.Module, classes: int, shape: Sequence[int], name: str) -> None:
    """Refuse a network that does not answer with logits, in evaluation or in training."""
    expected = (2, classes)
    for is_training in (False, True):
        twin = copy.deepcopy(model).train(is_training)  # whose statistics may change
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = twin(torch.zeros(2, *shape))
        if not isinstance(found, Tensor) or found.shape != expected:
            shown = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise AnywidthError(
                f"--model {name}: in {'training' if is_training else 'evaluation'} it returns "
                f"{shown}; expected logits of shape (batch, {classes}), one per class"
            )
