"""Fold batch norm and weight norm into plain weights, for inference."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from anywidth.slimming.layers import only_normalises


def fold_norms(model: nn.Module, folds: list[tuple[str, str]]) -> None:
    """Replace weight norm by plain weights, and fold each batch norm into the layer before it."""
    for module in list(model.modules()):
        _bake_weight_norm(module)
    for layer_path, norm_path in folds:
        layer, norm = model.get_submodule(layer_path), model.get_submodule(norm_path)
        if not isinstance(layer, nn.Linear | _ConvNd) or not only_normalises(norm):
            continue
        if any(m._forward_hooks or m._forward_pre_hooks for m in (layer, norm)):
            continue  # which see, and may change, what merging leaves no trace of
        if norm.running_mean is not None and norm.running_var is not None:
            _merge(layer, norm, norm.running_mean, norm.running_var)
            parent, _, name = norm_path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.Identity())


def _bake_weight_norm(module: nn.Module) -> None:
    if parametrize.is_parametrized(module):
        for name in list(module.parametrizations):  # type: ignore[arg-type]
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    elif "weight_g" in module._parameters:
        nn.utils.remove_weight_norm(module)


@torch.no_grad()
def _merge(layer: nn.Linear | _ConvNd, norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """norm(w x + b) = (s w) x + s (b - mean) + shift, with s = weight / sqrt(variance + eps).

    The norm may be kept in a higher precision than the layer, whose own dtype the result has.
    """
    dtype = layer.weight.dtype
    scale = torch.rsqrt(variance + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -mean if layer.bias is None else layer.bias - mean
    bias = scale * shift if norm.bias is None else scale * shift + norm.bias
    layer.weight = nn.Parameter(_scaled(layer, scale).to(dtype), layer.weight.requires_grad)
    layer.bias = nn.Parameter(bias.to(dtype), layer.weight.requires_grad)


def _scaled(layer: nn.Linear | _ConvNd, scale: Tensor) -> Tensor:
    """The weight with each output channel scaled, on the output axis of the layer."""
    weight = layer.weight
    if not isinstance(layer, _ConvTransposeNd):
        return weight * scale.view(-1, *[1] * (weight.dim() - 1))
    groups, inside = layer.groups, weight.shape[1:]
    blocks = weight.reshape(groups, -1, *inside)
    factors = scale.view(groups, 1, inside[0], *[1] * (weight.dim() - 2))
    return (blocks * factors).reshape(weight.shape)
