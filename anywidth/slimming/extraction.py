"""Extract one width as a plain network that does not need this library."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves, tree_map

from anywidth.distributed import check_not_sharded
from anywidth.planning.modes import evaluating
from anywidth.planning.plain_tensors import release_tables
from anywidth.slimming.converted_part import converted_parts, network_in
from anywidth.slimming.fitting_config import fit_configs
from anywidth.slimming.folding import fold_norms
from anywidth.slimming.layers import widen_all
from anywidth.slimming.norm_statistics import norm_records, uncalibrated_allowed
from anywidth.slimming.record import record_of
from anywidth.slimming.spectral_weights import narrow_vectors
from anywidth.slimming.state import check_layers, state_of
from anywidth.width import Width

# The attributes of every module.
_OF_TORCH = frozenset(vars(nn.Module()))


def extract(model: nn.Module, width: Width, fold: bool = False) -> nn.Module:
    """A plain network with the weights of `model` at `width`.

    The result has the model's own class, torch's layers and its own dense tensors, which are
    channels-last if the model's are. It pickles, exports and trains like any other network. `model`
    is not changed.

    Args:
        model: a converted network, or a model with one in it; the rest of it is copied unchanged.
        width: a fraction of the full width, or a `ChannelConfig`.
        fold: fold each batch norm into the layer before it, and weight norm into plain weights.
            The result is for inference; it is returned in evaluation mode.

    A width whose batch-norm statistics were never calibrated takes the first channels of the full
    width's, with a warning: good enough to fine-tune from, not to evaluate.

    A Hugging Face network gets a `config` from which `from_pretrained` builds it. If no
    configuration fits, for example because its layers differ in width, `save_pretrained` raises an
    error.
    """
    state = state_of(network_in(model))
    path = next(iter(converted_parts(model)))
    active = state.resolve(width)
    is_full = active == state.plan.full
    records = norm_records(model).values()
    if any(one.lacks_full if is_full else not one.is_ready(active) for one in records):
        warnings.warn(
            f"extracting width {width} whose batch-norm statistics were not calibrated with these "
            "weights: it takes the first channels of the full width's. To evaluate it, call "
            "anywidth.calibrate(model, loader, widths=[...]) before extracting",
            stacklevel=2,
        )
    small = extract_quietly(model, width, fold)
    if fold or not is_full:
        fit_configs(small, path, state.plan, active)
    return small


def extract_quietly(model: nn.Module, width: Width, fold: bool = False) -> nn.Module:
    """`extract` for measurements and checks that need no statistics and no configuration."""
    network = network_in(model)
    path = next(iter(converted_parts(model)))
    state = state_of(network)
    check_layers(network)
    check_not_sharded(model, "extract")
    with state.at(network, width), without_graphs(model):
        small = copy.deepcopy(model, _active_copies(model))
    widen_all(small)
    release_tables(small.get_submodule(path), state.tables)
    own_classes(small)
    _compute_weights(small)
    if fold:
        small.eval()
        fold_norms(small.get_submodule(path), state.plan.folds)
    return small


def _active_copies(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy` in which each tensor was already copied: its active part.

    In evaluation mode every batch norm has statistics. Records are not copied, because the copy is
    a plain network.
    """
    copies: dict[int, Any] = {}
    with evaluating(model), uncalibrated_allowed(model), torch.no_grad():
        for module in model.modules():
            for name, whole in {**module._parameters, **module._buffers}.items():
                if whole is not None and id(whole) not in copies:
                    copies[id(whole)] = _like(whole, getattr(module, name))
            record = record_of(module)
            if record is not None:
                copies[id(record)] = record
        copies |= {id(whole): vector for whole, vector in narrow_vectors(model)}
    return copies


def _like(whole: Tensor, active: Tensor) -> Tensor:
    is_channels_last = whole.dim() == 4 and whole.stride() == _channels_last_strides(whole)
    form = torch.channels_last if is_channels_last else torch.contiguous_format
    fresh = active.detach().clone(memory_format=form)
    if isinstance(whole, nn.Parameter):
        return nn.Parameter(fresh, requires_grad=whole.requires_grad)
    return fresh


def _channels_last_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a channels-last tensor, also of a 1x1 filter, which counts as contiguous.

    Convolutions on a CPU choose their algorithm by strides, with up to twice the speed.
    """
    _, channels, height, width = tensor.shape
    return (channels * height * width, 1, channels * width, channels)


def own_classes(model: nn.Module) -> None:
    """Give the copies of parametrized modules their own classes, which torch would share.

    Otherwise, removing the parametrization of one would break the other.
    """
    for module in model.modules():
        if parametrize.is_parametrized(module):
            shared = type(module)
            inside = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__")}
            module.__class__ = type(shared.__name__, shared.__bases__, inside)


@contextlib.contextmanager
def without_graphs(model: nn.Module) -> Iterator[None]:
    """Detach what hooks computed, because torch cannot copy a tensor with a graph.

    These are weights, which the next forward computes again, and features that a module keeps.
    """
    computed = [
        (vars(module), name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in _OF_TORCH and any(map(_has_graph, tree_leaves(value)))
    ]
    for attributes, name, value in computed:
        attributes[name] = tree_map(lambda x: x.detach() if _has_graph(x) else x, value)
    try:
        yield
    finally:
        for attributes, name, value in computed:
            attributes[name] = value


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf


@torch.no_grad()
def _compute_weights(model: nn.Module) -> None:
    """Hooks of weight norm and spectral norm keep the weight they compute as an attribute."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                setattr(module, hook.name, hook.compute_weight(module))
            elif isinstance(hook, SpectralNorm):
                setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=False))
