"""On a GPU, converted layers that run on kernels whose channel count is a run-time argument.

cuDNN prepares every new shape of a convolution anew, up to a second each; these layers do not:
depthwise convolutions and batch norm (with the activation after it) are Triton kernels, pointwise
convolutions are plain matrix products. Each takes its fast path where it can and does what it did
before everywhere else, so the same network still runs on a CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _NormBase

from anywidth import kernels
from anywidth.convert import plan_of
from anywidth.kernels.shared_buffers import cast_weight, gradient_sum
from anywidth.layers import (
    cut_name,
    drop_fast_paths,
    is_narrowed,
    is_switched_norm,
    only_normalises,
    scale_name,
)

_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
}
_DONE = "_is_activated"


def use_kernels(model: nn.Module, enabled: bool = True) -> nn.Module:
    """Lets a converted network's layers take their fast path on a GPU, or forbids it again.

    Nothing changes but speed and the last bits of rounding. Call it before training starts.
    """
    if not enabled or not kernels.available():
        drop_fast_paths(model)
        return model
    for norm, activation in plan_of(model).activations:
        _join(model.get_submodule(norm), model.get_submodule(activation))
    for module in model.modules():
        if not is_narrowed(module) or "_slow_class" in module.__dict__:
            continue
        if isinstance(module, nn.Conv2d) and type(module).forward is nn.Conv2d.forward:
            if _is_depthwise(module):
                _give(module, _depthwise_forward)
            elif _is_pointwise(module):
                _give(module, _pointwise_forward)
        elif _is_plain_norm(module) and is_switched_norm(module):
            _give(module, _norm_forward)
    return model


def weights_read_cast(model: nn.Module) -> list[nn.Parameter]:
    """The weights that layers on their fast path read in the dtype of a pass."""
    weights = {
        id(module._parameters["weight"]): module._parameters["weight"]
        for module in model.modules()
        if getattr(type(module), "forward", None) is _pointwise_forward
    }
    return [weight for weight in weights.values() if isinstance(weight, nn.Parameter)]


def _give(module: nn.Module, forward: Any) -> None:
    slow: Any = type(module)
    module.__dict__["_slow_class"] = slow
    module.__class__ = _fast_class(slow, forward)


@cache
def _fast_class(slow: Any, forward: Any) -> type[nn.Module]:
    members = {
        "__module__": slow.__module__,
        "__qualname__": slow.__qualname__,
        "forward": forward,
        "_slow_forward": slow.forward,
    }
    return type(slow.__name__, (slow,), members)


# ---- convolutions --------------------------------------------------------------------------------


def _is_plain(module: nn.Conv2d) -> bool:
    return (
        module._parameters.get("weight") is not None
        and module.dilation == (1, 1)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and module.padding[0] == module.padding[1]
        and module.stride[0] == module.stride[1]
    )


def _is_depthwise(module: nn.Conv2d) -> bool:
    return (
        _is_plain(module)
        and module.bias is None
        and 1 < module.groups == module.in_channels == module.out_channels
        and module.kernel_size in ((3, 3), (5, 5))
        and module.stride[0] in (1, 2)
    )


def _is_pointwise(module: nn.Conv2d) -> bool:
    return (
        _is_plain(module)
        and module.groups == 1
        and module.kernel_size == (1, 1)
        and module.stride == (1, 1)
        and module.padding == (0, 0)
    )


def _reach(x: Tensor) -> bool:
    return not _is_traced() and x.dim() == 4 and kernels.reach(x)


def _is_traced() -> bool:
    """`torch.compile`, `torch.export` and `torch.func` get the layers as they were."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _depthwise_forward(self: Any, x: Tensor) -> Tensor:
    weight, stride, padding = self._parameters["weight"], self.stride[0], self.padding[0]
    if _reach(x) and type(self.__dict__.get(cut_name("weight", 0))) is int:
        x = x.contiguous(memory_format=torch.channels_last)
        if kernels.supports_depthwise_conv2d(x, weight, stride, padding):
            return kernels.depthwise_conv2d(x, weight, stride, padding)
    result: Tensor = self._slow_forward(x)
    return result


def _pointwise_forward(self: Any, x: Tensor) -> Tensor:
    if not _reach(x):
        result: Tensor = self._slow_forward(x)
        return result
    state = self.__dict__
    pixels = x.permute(0, 2, 3, 1)  # a view of channels-last memory
    cuts = (state.get(cut_name("weight", 0)), state.get(cut_name("weight", 1)))
    weight = self._parameters["weight"]
    made = weight.shape[0] if cuts[0] is None else cuts[0]
    read = weight.shape[1] if cuts[1] is None else cuts[1]
    is_plain = state.get(scale_name("weight"), 1.0) == 1.0 and self._parameters["bias"] is None
    if is_plain and isinstance(made, int) and isinstance(read, int):
        result = _Pointwise.apply(pixels, weight, made, read)
    else:
        result = nn.functional.linear(pixels, self.weight.flatten(1), self.bias)
    return result.permute(0, 3, 1, 2)


class _Pointwise(torch.autograd.Function):
    """A product with the first rows and columns of a weight, whose gradient is written at once.

    Slicing the weight with autograd would fill and copy its whole gradient once for each axis.
    """

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, weight: Tensor, made: int, read: int) -> Tensor:
        dtype = pixels.dtype
        if torch.is_autocast_enabled(pixels.device.type):
            dtype = torch.get_autocast_dtype(pixels.device.type)
        rows = pixels.to(dtype).reshape(-1, read)
        active = cast_weight(weight)[:made, :read, 0, 0].to(dtype)
        ctx.save_for_backward(rows, active, weight)
        ctx.pixels = pixels.shape, pixels.dtype
        return (rows @ active.t()).view(*pixels.shape[:-1], made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, active, weight = ctx.saved_tensors
        shape, dtype = ctx.pixels
        gradient = gradient.reshape(-1, active.shape[0]).to(rows.dtype)
        to_pixels = to_weight = None
        if ctx.needs_input_grad[0]:
            to_pixels = (gradient @ active).view(shape).to(dtype)
        if ctx.needs_input_grad[1]:
            total = gradient_sum(weight)
            found = gradient.t() @ rows
            if total is not None:
                total[: active.shape[0], : active.shape[1], 0, 0] += found
            else:
                to_weight = torch.zeros_like(weight)
                to_weight[: active.shape[0], : active.shape[1], 0, 0] = found
        return to_pixels, to_weight, None, None


# ---- batch norm with its activation --------------------------------------------------------------


def _join(norm: nn.Module, activation: nn.Module) -> None:
    """Lets a batch norm do the work of the activation that alone reads its output."""
    kind = _ACTIVATIONS.get(_slow_class(activation))
    if kind is not None and _is_plain_norm(norm) and is_narrowed(norm):
        if "_slow_class" not in activation.__dict__:
            _give(activation, _joined_forward)
        norm.__dict__["_activation"] = (kind, activation)


def _is_plain_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d) and only_normalises(module)


def _is_watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _slow_class(module: nn.Module) -> Any:
    return module.__dict__.get("_slow_class", type(module))


def _joined_forward(self: Any, x: Tensor) -> Tensor:
    """Passes on what the norm before it has activated; a module may be called elsewhere too."""
    if not _is_traced() and x.__dict__.pop(_DONE, False):
        return x
    result: Tensor = self._slow_forward(x)
    return result


def _norm_forward(self: Any, x: Tensor) -> Tensor:
    if not (_reach(x) and self.training and _is_prefix(self)):
        result: Tensor = self._slow_forward(x)
        return result
    kind, activation = self.__dict__.get("_activation", ("none", None))
    if activation is not None and (_is_watched(self) or _is_watched(activation)):
        kind = "none"  # hooks may hand on another tensor, or want to see this one
    weight, bias = self._parameters["weight"], self._parameters["bias"]
    mean = var = batches = None
    momentum = self.momentum
    if self.track_running_stats:
        mean, var = self.running_mean, self.running_var
        batches = None if mean is None else self.num_batches_tracked
    x = x.contiguous(memory_format=torch.channels_last)
    if momentum is None or not kernels.supports_batch_norm_act(x, weight, bias, mean, var, kind):
        slow: Tensor = self._slow_forward(x)
        return slow
    done = kernels.batch_norm_act(x, weight, bias, mean, var, momentum, self.eps, kind, batches)
    if kind != "none":
        done.__dict__[_DONE] = True
    return done


def _is_prefix(norm: _NormBase) -> bool:
    """The kernel takes the first channels; joined stretches and private scales go the slow way."""
    return (
        norm._parameters.get("weight") is not None
        and type(norm.__dict__.get(cut_name("weight", 0))) is int
        and "_switches" not in norm.__dict__
    )
