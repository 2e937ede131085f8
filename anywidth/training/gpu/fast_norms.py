"""Batch norms: Triton kernels that also activate, or leave their work to the next convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from anywidth.slimming.layers import only_normalises
from anywidth.slimming.norm_statistics import norm_record
from anywidth.slimming.record import plain_class
from anywidth.training.gpu import kernels
from anywidth.training.gpu.fast_convolutions import (
    depthwise_forward,
    is_taken,
    pointwise_forward,
)
from anywidth.training.gpu.fast_paths import (
    DEFERRED,
    PARTIAL,
    are_watched,
    fast_path,
    give,
    has,
    is_traced,
    leave,
    reach,
    slowly,
    take,
)
from anywidth.training.gpu.residual_sums import can_wait, waiting

_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
}
_DONE = "_is_activated"


def join(norm: nn.Module, activation: nn.Module) -> None:
    """Let a batch norm compute the activation after it, which is the only reader of its output."""
    kind, path = _ACTIVATIONS.get(plain_class(activation)), fast_path(norm)
    if kind is not None and path is not None and path.forward is norm_forward:
        if fast_path(activation) is None:
            give(activation, _joined_forward)
        path.activation = (kind, activation)


def defer(norm: nn.Module, activation: nn.Module, convolution: nn.Module) -> None:
    """Let a convolution compute the norm and activation that only it reads."""
    path = fast_path(norm)
    joined = None if path is None or path.activation is None else path.activation[1]
    can_normalise = has(convolution, depthwise_forward) or has(convolution, pointwise_forward)
    if path is not None and joined is activation and can_normalise:
        path.read_by = convolution


def is_plain_norm(module: nn.Module) -> bool:
    """Whether a module is a plain batch norm of images."""
    return isinstance(module, nn.BatchNorm2d) and only_normalises(module)


def norm_forward(self: Any, x: Tensor) -> Tensor:
    """A batch norm's forward; it activates its result, or leaves that to the next layer."""
    if not reach(x):
        return slowly(self, x)
    partial, path = take(x, PARTIAL), fast_path(self)
    assert path is not None
    reader = path.read_by
    reading = None if reader is None else fast_path(reader)
    if reading is not None:
        reading.awaits = False
    if not (self.training and _is_prefix(self)):
        return slowly(self, x)
    kind, activation = path.activation or ("none", None)
    if activation is not None and are_watched(self, activation):
        kind = "none"
    norm = _norm(self, kind)
    x = x.contiguous(memory_format=torch.channels_last)
    if self.momentum is None or not kernels.supports_batch_norm_act(x, norm):
        return slowly(self, x)
    if kind != "none" and reader is not None and reading is not None and _can_defer(reader, x):
        reading.awaits, reading.has_taken = True, False
        done = x.view_as(x)
        leave(done, DEFERRED, kernels.deferred_norm(x, norm, partial))
    elif path.is_summed and can_wait(self, x):
        return waiting(x, kernels.deferred_norm(x, norm, partial))
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
    """Whether a convolution can normalise and activate its input itself, and this is faster."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype
    return not (is_cast or kernels.has_few_pixels(x) or are_watched(reader)) and is_taken(reader, x)


def _joined_forward(self: Any, x: Tensor) -> Tensor:
    """Return the input if the norm before has activated it; other callers get the activation."""
    if not is_traced() and x.__dict__.pop(_DONE, False):
        return x
    return slowly(self, x)


def _is_prefix(norm: nn.Module) -> bool:
    """Whether the norm uses the first channels and shared scales, as the kernel needs."""
    record = norm_record(norm)
    if record is None or record.switches is not None or norm._parameters.get("weight") is None:
        return False
    if record.tuned(norm) is not None:
        return False
    return type(record.cut("weight", 0)) is int
