"""Running statistics of a norm by width: it reads those of the width it is set to.

The full width's are its buffers; all others are in its bank, by configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import cut_name, held_tensor, take
from anywidth.width import ChannelConfig

# Buffers of a norm that each width has its own of.
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")
_ATTRIBUTES = ("_bank", "_config", "_is_full", "_label", "_lenient", "_switches")


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module tracks what it normalises by, as batch norm does."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def switch_norm(norm: nn.Module) -> None:
    """Gives a norm an empty bank, at its full width."""
    norm.__dict__.update(_bank={}, _config=None, _is_full=True, _label=None, _lenient=False)


def unswitch_norm(norm: nn.Module) -> None:
    for name in _ATTRIBUTES:
        norm.__dict__.pop(name, None)


def is_switched_norm(module: nn.Module) -> bool:
    """Whether a module keeps running statistics by width."""
    return "_bank" in module.__dict__ and isinstance(module, _NormBase)


def switched_members(plain: type[nn.Module]) -> dict[str, Any]:
    """What the class of a norm is given so that it reads, and loads, by width."""
    return {
        **{name: property(_running(name)) for name in _RUNNING},
        "_load_from_state_dict": _loading_statistics(plain),
    }


def assign_statistics(norm: nn.Module, name: str, value: Any) -> bool:
    """Whether a value is one of a narrower width's statistics; it has then been put there.

    A width that is not tracked keeps none.
    """
    if name not in _RUNNING or norm.__dict__.get("_is_full", True):
        return False
    expected = sliced_statistics(norm, name)
    if expected is None or not isinstance(value, Tensor) or value.shape != expected.shape:
        return False
    entry: Statistics | None = norm.__dict__["_bank"].get(norm.__dict__["_config"])
    if entry is not None:
        with torch.no_grad():
            getattr(entry, name).copy_(value)
    return True


def map_statistics(norm: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """`model.to(...)`: the statistics of all widths move with the module."""
    for entry in norm.__dict__["_bank"].values():
        for name in _RUNNING:
            setattr(entry, name, function(getattr(entry, name)))


@dataclass
class Statistics:
    """Running statistics of one batch norm at one configuration.

    `label` is the width as the user gave it, for messages; `ready` is false until the first
    batch was seen.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    label: float | None = None
    ready: bool = False


def new_statistics(module: nn.Module, size: int, label: float | None) -> Statistics:
    """Statistics as a new batch norm of `size` channels would start with."""
    like = held_tensor(module, "running_mean")
    assert like is not None
    with torch.inference_mode(False):  # what is made in that mode could never be updated outside
        return Statistics(
            like.new_zeros(size),
            like.new_ones(size),
            torch.zeros((), dtype=torch.long, device=like.device),
            label,
        )


def tracked_statistics(model: nn.Module, config: ChannelConfig | None = None) -> list[Statistics]:
    """What a network knows of widths other than the full one, whose are in its buffers.

    Of one configuration, or of all.
    """
    norms = [module for module in model.modules() if is_switched_norm(module)]
    banks: list[dict[ChannelConfig, Statistics]] = [norm.__dict__["_bank"] for norm in norms]
    return [e for bank in banks for c, e in bank.items() if config is None or c == config]


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Puts back what passes in between have changed: buffers, and statistics of all widths."""
    entries = tracked_statistics(model)
    ready = [entry.ready for entry in entries]
    held = [(module, dict(module._buffers)) for module in model.modules()]
    tensors = list(model.buffers())
    for entry in entries:
        tensors += [entry.running_mean, entry.running_var, entry.num_batches_tracked]
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.update(buffers)  # a forward may have assigned others
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        for entry, was_ready in zip(entries, ready, strict=True):
            entry.ready = was_ready


def _running(name: str) -> Callable[[nn.Module], Tensor | None]:
    def running(self: nn.Module) -> Tensor | None:
        state = self.__dict__
        if state["_is_full"]:
            return self._buffers[name]
        entry: Statistics | None = state["_bank"].get(state["_config"])
        if self.training:
            # Widths that are not tracked use the batch's own statistics and leave no trace.
            if entry is None:
                return None
            entry.ready = True
        elif entry is None or not entry.ready:
            if not state["_lenient"]:
                raise _uncalibrated(state["_label"], entry, state["_bank"].values())
            return sliced_statistics(self, name)
        tensor: Tensor = getattr(entry, name)
        return tensor

    return running


@contextlib.contextmanager
def uncalibrated_allowed(model: nn.Module) -> Iterator[None]:
    """Lets widths without statistics be evaluated with the first of the full width's.

    For checks and for showing what calibration is worth; accuracy is poor there.
    """
    norms = [module for module in model.modules() if is_switched_norm(module)]
    before = [module.__dict__["_lenient"] for module in norms]
    for module in norms:
        module.__dict__["_lenient"] = True
    try:
        yield
    finally:
        for module, lenient in zip(norms, before, strict=True):
            module.__dict__["_lenient"] = lenient


def sliced_statistics(module: nn.Module, name: str) -> Tensor | None:
    """The first of the full width's, as many as the module's present width has."""
    tensor = module._buffers[name]
    cut = module.__dict__.get(cut_name("running_mean", 0))
    return tensor if tensor is None or tensor.dim() == 0 or cut is None else take(tensor, 0, cut)


class MissingStatisticsError(AnywidthError):
    """A width is evaluated whose batch-norm statistics are not known."""


def _uncalibrated(
    label: float | None, entry: Statistics | None, entries: Iterable[Statistics]
) -> MissingStatisticsError:
    known = sorted(e.label for e in entries if e.ready and e.label is not None)
    width = "this configuration" if label is None else f"width {label}"
    was_known = entry is not None and bool(entry.num_batches_tracked > 0)
    return MissingStatisticsError(
        f"batch norm has no statistics for {width}: calibrated are the full width"
        + (f" and {known}" if known else " alone")
        + ("; what it had was of the weights before load_state_dict" if was_known else "")
        + f". Call anywidth.calibrate(model, loader, widths=[{label if label else 'config'}]) first"
    )


def _loading_statistics(plain: type[nn.Module]) -> Callable[..., None]:
    """Loads a norm; where it gets other statistics, those of narrower widths hold no longer.

    They are of the weights before, and would be wrong in silence. The same weights loaded again
    change nothing.
    """

    def load(self: nn.Module, *arguments: Any) -> None:
        state, names = self.__dict__, ("running_mean", "running_var")
        held = [self._buffers[name] for name in names]
        values = [None if tensor is None else tensor.clone() for tensor in held]
        is_full, state["_is_full"] = state["_is_full"], True  # a state_dict is of the full width
        try:
            plain._load_from_state_dict(self, *arguments)
        finally:
            state["_is_full"] = is_full
        if not all(_is_same(self._buffers[n], v) for n, v in zip(names, values, strict=True)):
            for entry in state["_bank"].values():
                entry.ready = False

    return load


def _is_same(tensor: Tensor | None, value: Tensor | None) -> bool:
    if tensor is None or value is None:
        return tensor is value
    is_comparable = tensor.device == value.device and not tensor.is_meta
    return is_comparable and tensor.dtype == value.dtype and torch.equal(tensor, value)


def norm_values(
    module: nn.Module, config: ChannelConfig, is_full: bool, label: float | None
) -> dict[str, Any]:
    """What `set_width` writes into a batch norm, besides its cuts."""
    entry: Statistics | None = module.__dict__["_bank"].get(config)
    if entry is not None and entry.label is None:
        entry.label = label
    return {"_config": config, "_is_full": is_full, "_label": label}
