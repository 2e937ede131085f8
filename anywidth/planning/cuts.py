"""The active part of a tensor, and the name under which a converted module keeps it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.planning.groups import Axis, Plan
from anywidth.width import ChannelConfig

# The active part of an axis: the number of first entries, or (start, length) stretches.
Cut = int | tuple[tuple[int, int], ...]

RECORD = "_anywidth"
"""The one attribute that conversion adds to a module; all others belong to the module's author."""


def cut(plan: Plan, axis: Axis, config: ChannelConfig) -> Cut:
    ranges = plan.axis_ranges(axis or (), config)
    if len(ranges) == 1 and ranges[0][0] == 0:
        return ranges[0][1]
    return ranges


def cut_size(cut: Cut) -> int:
    """The number of entries that a cut keeps."""
    return cut if isinstance(cut, int) else sum(length for _, length in cut)


def take(tensor: Tensor, axis: int, cut: Cut) -> Tensor:
    """The active entries of one axis; a view if they are the first ones."""
    if isinstance(cut, int):
        return tensor if cut == tensor.shape[axis] else tensor.narrow(axis, 0, cut)
    return torch.cat([tensor.narrow(axis, start, length) for start, length in cut], axis)


def held_tensor(module: nn.Module, name: str) -> Tensor | None:
    """A whole parameter or buffer of a module, or of one inside it, whatever the width."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    return owner._parameters[key] if key in owner._parameters else owner._buffers.get(key)


def copied(model: nn.Module, tensors: dict[int, Any]) -> nn.Module:
    """A deep copy with other tensors in place of those with these identities."""
    memo = dict(tensors)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):  # a weight that a hook computes
                memo[id(value)] = value.detach()
    return copy.deepcopy(model, memo)


def is_converted(model: nn.Module) -> bool:
    """Whether a network, or a part of it, has been converted."""
    return any(RECORD in module.__dict__ for module in model.modules())
