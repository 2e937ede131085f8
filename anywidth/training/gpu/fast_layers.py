"""Converted layers that use kernels on a GPU whose channel count is a run-time argument.

cuDNN prepares every new shape of a convolution, which takes up to a second. These layers do not
need that: depthwise convolutions, convolutions of images and batch norm (with the activation after
it) are Triton kernels, and pointwise convolutions are matrix products. A layer that cannot use its
fast path runs as before, so the same network still runs on a CPU.
"""

from __future__ import annotations

from torch import nn

from anywidth.slimming.convert import plan_of
from anywidth.slimming.layers import drop_fast_paths, is_narrowed
from anywidth.slimming.norm_statistics import norm_record
from anywidth.training.gpu import kernels
from anywidth.training.gpu.fast_convolutions import (
    depthwise_forward,
    is_depthwise,
    is_pointwise,
    is_stem,
    pointwise_forward,
    stem_forward,
)
from anywidth.training.gpu.fast_norms import defer, is_plain_norm, join, norm_forward
from anywidth.training.gpu.fast_paths import fast_path, give, has

# Their kernels take statistics for the norm that follows.
_MEASURING = (depthwise_forward, stem_forward, pointwise_forward)


def use_kernels(model: nn.Module, enabled: bool = True) -> nn.Module:
    """Allow the layers of a converted network to use their fast path on a GPU, or forbid it.

    Only speed and rounding in the last bits change. Call it before training starts.
    """
    if not enabled or not kernels.available():
        drop_fast_paths(model)
        return model
    plan = plan_of(model)
    for module in model.modules():
        if not is_narrowed(module) or fast_path(module) is not None:
            continue
        if isinstance(module, nn.Conv2d) and type(module).forward is nn.Conv2d.forward:
            if is_depthwise(module):
                give(module, depthwise_forward)
            elif is_pointwise(module):
                give(module, pointwise_forward)
            elif is_stem(module):
                give(module, stem_forward)
        elif is_plain_norm(module) and norm_record(module) is not None:
            give(module, norm_forward)
    for norm, activation in plan.activations:
        join(model.get_submodule(norm), model.get_submodule(activation))
    for norm, activation, convolution in plan.prologues:
        defer(*(model.get_submodule(path) for path in (norm, activation, convolution)))
    for norm in plan.sums:
        path = fast_path(model.get_submodule(norm))
        if path is not None and path.forward is norm_forward:
            path.is_summed = path.activation is None
    for layer, norm in plan.folds:
        maker, after = model.get_submodule(layer), model.get_submodule(norm)
        path = fast_path(maker)
        measures = path is not None and path.forward in _MEASURING
        if path is not None and measures and has(after, norm_forward):
            path.norm_after = after
    return model


def weights_read_cast(model: nn.Module) -> list[nn.Parameter]:
    """The weights that fast layers read in the dtype of a pass."""
    weights = {
        id(module._parameters["weight"]): module._parameters["weight"]
        for module in model.modules()
        if has(module, pointwise_forward)
    }
    return [weight for weight in weights.values() if isinstance(weight, nn.Parameter)]
