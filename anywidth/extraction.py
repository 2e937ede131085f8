"""A standalone static network at one width, with no trace of this library."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights
from torch.nn.utils.weight_norm import WeightNorm

from anywidth.layers import (
    drop_fast_paths,
    is_narrowed,
    is_switched_norm,
    uncalibrated_allowed,
    widen,
)
from anywidth.state import STATE, state_of
from anywidth.width import Width


def extract(model: nn.Module, width: Width, fold: bool = False) -> nn.Module:
    """A plain network with the weights that `model` has at `width`.

    The result is of the model's own class, made of torch's layers, with its own contiguous
    tensors; it pickles, exports and trains like any other network. `model` is not changed.

    Args:
        model: a converted network.
        width: a fraction of the full width, or a `ChannelConfig`.
        fold: merge each batch norm into the layer before it, and weight norm into plain weights.
            The result is for inference; it is returned in evaluation mode.

    A width whose batch-norm statistics were never calibrated takes the first channels of the full
    width's, with a warning: good enough to fine-tune from, not to evaluate.
    """
    state = state_of(model)
    _detach_computed_weights(model)
    before = state.width
    state.set(model, width)
    try:
        _warn_if_uncalibrated(model, state.config == state.plan.full, width)
        small = copy.deepcopy(model, _active_copies(model))
    finally:
        state.set(model, before)
    drop_fast_paths(small)
    for module in small.modules():
        if is_narrowed(module):
            widen(module)
    del small.__dict__[STATE]
    _compute_weights(small)
    if fold:
        small.eval()
        _fold(small, state.plan.folds)
    return small


def extract_quietly(model: nn.Module, width: Width, fold: bool = False) -> nn.Module:
    """`extract` for measuring and checking, where statistics do not matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return extract(model, width, fold)


def _active_copies(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy` in which each tensor was already copied: its active part."""
    copies: dict[int, Any] = {}
    with uncalibrated_allowed(model), torch.no_grad():
        for module in model.modules():
            for name, whole in {**module._parameters, **module._buffers}.items():
                if whole is not None and id(whole) not in copies:
                    copies[id(whole)] = _like(whole, _in_evaluation(module, name))
            if is_switched_norm(module):
                copies[id(module.__dict__["_bank"])] = {}
    return copies


def _in_evaluation(module: nn.Module, name: str) -> Tensor:
    """An attribute as it reads in evaluation mode, where every batch norm has statistics."""
    training, module.training = module.training, False
    try:
        tensor = getattr(module, name)
    finally:
        module.training = training
    assert isinstance(tensor, Tensor)
    return tensor


def _like(whole: Tensor, active: Tensor) -> Tensor:
    fresh = active.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(whole, nn.Parameter):
        return nn.Parameter(fresh, requires_grad=whole.requires_grad)
    return fresh


def _warn_if_uncalibrated(model: nn.Module, is_full: bool, width: Width) -> None:
    if is_full:
        return
    for module in model.modules():
        if is_switched_norm(module):
            entry = module.__dict__["_bank"].get(module.__dict__["_config"])
            if entry is None or not entry.ready:
                warnings.warn(
                    f"extracting width {width} whose batch-norm statistics were not calibrated: "
                    "it takes the first channels of the full width's. To evaluate it, call "
                    "anywidth.calibrate(model, loader, widths=[...]) before extracting",
                    stacklevel=3,
                )
                return


def _weight_norm_hooks(model: nn.Module) -> list[tuple[nn.Module, WeightNorm]]:
    """`torch.nn.utils.weight_norm` keeps the weight it computed last as a plain attribute."""
    return [
        (module, hook)
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, WeightNorm)
    ]


def _detach_computed_weights(model: nn.Module) -> None:
    # torch cannot copy a tensor that carries a graph; the next forward computes it anew.
    for module, hook in _weight_norm_hooks(model):
        setattr(module, hook.name, getattr(module, hook.name).detach())


def _compute_weights(model: nn.Module) -> None:
    with torch.no_grad():
        for module, hook in _weight_norm_hooks(model):
            setattr(module, hook.name, hook.compute_weight(module))


# ---- folding -------------------------------------------------------------------------------------


# Layers that a batch norm after them can be merged into.
_MERGED = (nn.Linear, nn.modules.conv._ConvNd)


def _fold(model: nn.Module, folds: list[tuple[str, str]]) -> None:
    for module in list(model.modules()):
        _bake_weight_norm(module)
    for layer_path, norm_path in folds:
        layer, norm = model.get_submodule(layer_path), model.get_submodule(norm_path)
        is_norm = isinstance(norm, nn.modules.batchnorm._BatchNorm)
        if isinstance(layer, _MERGED) and is_norm and norm.running_mean is not None:
            _merge(layer, norm)
            parent, _, name = norm_path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.Identity())


def _bake_weight_norm(module: nn.Module) -> None:
    if parametrize.is_parametrized(module):
        for name in list(module.parametrizations):  # type: ignore[arg-type]
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    elif "weight_g" in module._parameters:
        nn.utils.remove_weight_norm(module)


def _merge(layer: nn.Module, norm: nn.modules.batchnorm._BatchNorm) -> None:
    arguments = (
        layer.weight,
        layer.bias,
        norm.running_mean,
        norm.running_var,
        norm.eps,
        norm.weight if norm.weight is not None else torch.ones_like(norm.running_mean),
        norm.bias if norm.bias is not None else torch.zeros_like(norm.running_mean),
    )
    with torch.no_grad():
        if isinstance(layer, nn.Linear):
            weight, bias = fuse_linear_bn_weights(*arguments)  # type: ignore[arg-type]
        else:
            transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
            weight, bias = fuse_conv_bn_weights(*arguments, transpose=transposed)  # type: ignore[arg-type]
    layer.weight, layer.bias = weight, bias
