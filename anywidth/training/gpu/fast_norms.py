"""Batch norms: Triton kernels that also activate, or leave their work to the next convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from anywidth.planning.cuts import cut_name
from anywidth.slimming.layers import is_narrowed, only_normalises
from anywidth.training.gpu import kernels
from anywidth.training.gpu.fast_convolutions import depthwise_forward, is_taken
from anywidth.training.gpu.fast_paths import (
    DEFERRED,
    PARTIAL,
    are_watched,
    give,
    has,
    is_traced,
    leave,
    reach,
    take,
)

_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
}
_DONE = "_is_activated"


def join(norm: nn.Module, activation: nn.Module) -> None:
    """Lets a batch norm do the work of the activation that alone reads its output."""
    kind = _ACTIVATIONS.get(_slow_class(activation))
    if kind is not None and is_plain_norm(norm) and is_narrowed(norm):
        if "_slow_class" not in activation.__dict__:
            give(activation, _joined_forward)
        norm.__dict__["_activation"] = (kind, activation)


def defer(norm: nn.Module, activation: nn.Module, convolution: nn.Module) -> None:
    """Lets a depthwise convolution do the work of the norm and activation that it alone reads."""
    joined = norm.__dict__.get("_activation", ("none", None))[1]
    if has(norm, norm_forward) and joined is activation and has(convolution, depthwise_forward):
        norm.__dict__["_read_by"] = convolution


def is_plain_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm of images and no more."""
    return isinstance(module, nn.BatchNorm2d) and only_normalises(module)


def norm_forward(self: Any, x: Tensor) -> Tensor:
    """A batch norm's forward; what it returns is activated already, or will be."""
    if not reach(x):
        result: Tensor = self._slow_forward(x)
        return result
    partial = take(x, PARTIAL)
    reader = self.__dict__.get("_read_by")
    if reader is not None:
        reader.__dict__["_awaits"] = False
    if not (self.training and _is_prefix(self)):
        plain: Tensor = self._slow_forward(x)
        return plain
    kind, activation = self.__dict__.get("_activation", ("none", None))
    if activation is not None and are_watched(self, activation):
        kind = "none"
    norm = _norm(self, kind)
    x = x.contiguous(memory_format=torch.channels_last)
    if self.momentum is None or not kernels.supports_batch_norm_act(x, norm):
        slow: Tensor = self._slow_forward(x)
        return slow
    if kind != "none" and reader is not None and _can_defer(reader, x):
        reader.__dict__["_awaits"] = True
        done = x.view_as(x)
        leave(done, DEFERRED, kernels.deferred_norm(x, norm, partial))
    else:
        done = kernels.batch_norm_act(x, norm, partial)
    if kind != "none":
        done.__dict__[_DONE] = True
    return done


def _norm(module: Any, activation: str) -> kernels.BatchNorm:
    mean = var = batches = None
    if module.track_running_stats:
        mean, var = module.running_mean, module.running_var
        batches = None if mean is None else module.num_batches_tracked
    parameters = module._parameters["weight"], module._parameters["bias"]
    return kernels.BatchNorm(
        *parameters, activation, mean, var, batches, module.momentum, module.eps
    )


def _can_defer(reader: nn.Module, x: Tensor) -> bool:
    """Whether a convolution can normalise and activate its input itself, and it is worth it."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype
    return not (is_cast or kernels.has_few_pixels(x) or are_watched(reader)) and is_taken(reader, x)


def _slow_class(module: nn.Module) -> Any:
    return module.__dict__.get("_slow_class", type(module))


def _joined_forward(self: Any, x: Tensor) -> Tensor:
    """Passes on what the norm before it has activated; a module may be called elsewhere too."""
    if not is_traced() and x.__dict__.pop(_DONE, False):
        return x
    result: Tensor = self._slow_forward(x)
    return result


def _is_prefix(norm: _NormBase) -> bool:
    """The kernel takes the first channels; joined stretches and private scales go the slow way."""
    return (
        norm._parameters.get("weight") is not None
        and type(norm.__dict__.get(cut_name("weight", 0))) is int
        and "_switches" not in norm.__dict__
    )
