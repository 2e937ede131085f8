"""What is active of a tensor, and where a module keeps it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# What is active along an axis: the first so many entries, or (start, length) stretches.
Cut = int | tuple[tuple[int, int], ...]

PREFIX = "_anywidth_"
"""Of what a narrowed module keeps beside its own attributes, whose names are up to its author."""


def take(tensor: Tensor, axis: int, cut: Cut) -> Tensor:
    """The active entries of one axis: a view where they are the first ones."""
    if isinstance(cut, int):
        return tensor if cut == tensor.shape[axis] else tensor.narrow(axis, 0, cut)
    return torch.cat([tensor.narrow(axis, start, length) for start, length in cut], axis)


def cut_name(tensor: str, axis: int) -> str:
    """The attribute of a narrowed module that holds the cut of one axis."""
    return f"{PREFIX}active_{tensor}_{axis}"


def scale_name(tensor: str) -> str:
    """The attribute that holds what a tensor is multiplied by (output averaging)."""
    return f"{PREFIX}scale_{tensor}"


def held_tensor(module: nn.Module, name: str) -> Tensor | None:
    """A module's whole parameter or buffer, whatever its width."""
    if name in module._parameters:
        return module._parameters[name]
    return module._buffers.get(name)
