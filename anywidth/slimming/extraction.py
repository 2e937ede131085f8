"""A standalone static network at one width, with no trace of this library."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm

from anywidth.distributed import check_not_sharded
from anywidth.slimming.folding import fold_norms
from anywidth.slimming.layers import widen_all
from anywidth.slimming.norm_statistics import norm_records, uncalibrated_allowed
from anywidth.slimming.record import record_of
from anywidth.slimming.state import check_layers, state_of
from anywidth.width import Width


def extract(model: nn.Module, width: Width, fold: bool = False) -> nn.Module:
    """A plain network with the weights that `model` has at `width`.

    The result is of the model's own class, made of torch's layers, with dense tensors of its own,
    channels-last where the model's are; it pickles, exports and trains like any other network.
    `model` is not changed.

    Args:
        model: a converted network.
        width: a fraction of the full width, or a `ChannelConfig`.
        fold: merge each batch norm into the layer before it, and weight norm into plain weights.
            The result is for inference; it is returned in evaluation mode.

    A width whose batch-norm statistics were never calibrated takes the first channels of the full
    width's, with a warning: good enough to fine-tune from, not to evaluate.
    """
    state = state_of(model)
    check_layers(model)
    check_not_sharded(model, "extract")
    before = state.width
    state.set(model, width)
    try:
        _warn_if_uncalibrated(model, state.config == state.plan.full, width)
        with _without_graphs(model):
            small = copy.deepcopy(model, _active_copies(model))
    finally:
        state.set(model, before)
    widen_all(small)
    _own_classes(small)
    _compute_weights(small)
    if fold:
        small.eval()
        fold_norms(small, state.plan.folds)
    return small


def extract_quietly(model: nn.Module, width: Width, fold: bool = False) -> nn.Module:
    """`extract` for measuring and checking, where statistics do not matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return extract(model, width, fold)


def _active_copies(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy` in which each tensor was already copied: its active part.

    Records are not copied, as the copy is to lose them.
    """
    copies: dict[int, Any] = {}
    with uncalibrated_allowed(model), torch.no_grad():
        for module in model.modules():
            for name, whole in {**module._parameters, **module._buffers}.items():
                if whole is not None and id(whole) not in copies:
                    copies[id(whole)] = _like(whole, _in_evaluation(module, name))
            record = record_of(module)
            if record is not None:
                copies[id(record)] = record
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
    is_channels_last = whole.dim() == 4 and whole.stride() == _channels_last_strides(whole)
    form = torch.channels_last if is_channels_last else torch.contiguous_format
    fresh = active.detach().clone(memory_format=form)
    if isinstance(whole, nn.Parameter):
        return nn.Parameter(fresh, requires_grad=whole.requires_grad)
    return fresh


def _channels_last_strides(tensor: Tensor) -> tuple[int, ...]:
    """They tell a 1x1 filter laid out so from a contiguous one; `is_contiguous` takes it for both.

    Convolutions on a CPU choose their way by them, and differ in speed by half.
    """
    _, channels, height, width = tensor.shape
    return (channels * height * width, 1, channels * width, channels)


def _warn_if_uncalibrated(model: nn.Module, is_full: bool, width: Width) -> None:
    config = state_of(model).config
    records = norm_records(model).values()
    if not is_full and not all(record.is_ready(config) for record in records):
        warnings.warn(
            f"extracting width {width} whose batch-norm statistics were not calibrated: "
            "it takes the first channels of the full width's. To evaluate it, call "
            "anywidth.calibrate(model, loader, widths=[...]) before extracting",
            stacklevel=3,
        )


def _own_classes(model: nn.Module) -> None:
    """A parametrized module's class is its own; torch shares it with a copy.

    Removing the parametrization of one would then break the other.
    """
    for module in model.modules():
        if parametrize.is_parametrized(module):
            shared = type(module)
            inside = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__")}
            module.__class__ = type(shared.__name__, shared.__bases__, inside)


def _weight_norm_hooks(model: nn.Module) -> list[tuple[nn.Module, WeightNorm]]:
    """`torch.nn.utils.weight_norm` keeps the weight it computed last as a plain attribute."""
    return [
        (module, hook)
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, WeightNorm)
    ]


@contextlib.contextmanager
def _without_graphs(model: nn.Module) -> Iterator[None]:
    """Detaches the weights that hooks computed: torch cannot copy a tensor that carries a graph.

    The next forward computes them anew.
    """
    computed = [
        (vars(module), name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
    for attributes, name, value in computed:
        attributes[name] = value.detach()
    try:
        yield
    finally:
        for attributes, name, value in computed:
            attributes[name] = value


def _compute_weights(model: nn.Module) -> None:
    with torch.no_grad():
        for module, hook in _weight_norm_hooks(model):
            setattr(module, hook.name, hook.compute_weight(module))
