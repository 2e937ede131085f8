"""What is active of a tensor, and where a module keeps it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anywidth.planning.groups import Axis, Plan
from anywidth.width import ChannelConfig

# What is active along an axis: the first so many entries, or (start, length) stretches.
Cut = int | tuple[tuple[int, int], ...]

STATE = "_anywidth"
PREFIX = "_anywidth_"
"""Of what a narrowed module keeps beside its own attributes, whose names are up to its author."""


def cut(plan: Plan, axis: Axis, config: ChannelConfig) -> Cut:
    ranges = plan.axis_ranges(axis or (), config)
    if len(ranges) == 1 and ranges[0][0] == 0:
        return ranges[0][1]
    return ranges


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


def is_converted(model: nn.Module) -> bool:
    """Whether a network, or a part of it, has been converted."""
    marks = (STATE, "_plain_class")
    return any(mark in module.__dict__ for module in model.modules() for mark in marks)
