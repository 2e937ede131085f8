"""How a module narrows itself: it sees only the active part of its own parameters.

A narrowed module keeps its parameters as they are and gets a subclass of its own class in which
each of them is a property that returns the active part. Its forward, its hooks and both kinds of
weight norm then work on fewer channels without knowing of it. `torch.nn.utils.parametrize` does
the same to a class; unlike there, nothing in `state_dict` is renamed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from anywidth.errors import AnywidthError
from anywidth.width import ChannelConfig

# What is active along an axis: the first so many entries, or (start, length) stretches.
Cut = int | tuple[tuple[int, int], ...]


# What a narrowed module keeps beside its own attributes, whose names are up to its author.
_PREFIX = "_anywidth_"
VIEWS = f"{_PREFIX}views"
_OF_NORMS = ("_bank", "_config", "_is_full", "_label", "_lenient", "_switches")

# The child of a batch norm that has a scale and bias for each switch of a slimmable network.
PRIVATE_AFFINE = "private_affine"


# Buffers of a batch norm that each width has its own of.
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def take(tensor: Tensor, axis: int, cut: Cut) -> Tensor:
    """The active entries of one axis: a view where they are the first ones."""
    if isinstance(cut, int):
        return tensor if cut == tensor.shape[axis] else tensor.narrow(axis, 0, cut)
    return torch.cat([tensor.narrow(axis, start, length) for start, length in cut], axis)


def cut_name(tensor: str, axis: int) -> str:
    """The attribute of a narrowed module that holds the cut of one axis."""
    return f"{_PREFIX}active_{tensor}_{axis}"


def scale_name(tensor: str) -> str:
    """The attribute that holds what a tensor is multiplied by (output averaging)."""
    return f"{_PREFIX}scale_{tensor}"


def narrow(module: nn.Module, axes: dict[str, tuple[int, ...]]) -> None:
    """Gives a module the subclass in which the named tensors' named axes can be cut."""
    is_norm = isinstance(module, _NormBase) and module.running_mean is not None
    key = tuple(sorted(axes.items()))
    module.__dict__["_plain_class"] = type(module)
    module.__dict__[VIEWS] = Views()
    if is_norm:
        module.__dict__.update(_bank={}, _config=None, _is_full=True, _label=None, _lenient=False)
    module.__class__ = _narrowed_class(type(module), key, is_norm)  # type: ignore[arg-type]


def widen(module: nn.Module) -> None:
    """Undoes `narrow`; attributes set for a width are left for the caller to restore."""
    ours = [name for name in module.__dict__ if name.startswith(_PREFIX)]
    if is_switched_norm(module):
        ours += [name for name in _OF_NORMS if name in module.__dict__]
    module.__class__ = module.__dict__.pop("_plain_class")
    for name in ours:
        del module.__dict__[name]
    module._modules.pop(PRIVATE_AFFINE, None)


def drop_fast_paths(model: nn.Module) -> None:
    """Gives every layer back the forward it had before `fast_layers.use_kernels`."""
    for module in model.modules():
        if "_slow_class" in module.__dict__:
            module.__class__ = module.__dict__.pop("_slow_class")
            for name in ("_activation", "_read_by", "_norm_after", "_awaits"):
                module.__dict__.pop(name, None)


def is_narrowed(module: nn.Module) -> bool:
    return "_plain_class" in module.__dict__


def is_switched_norm(module: nn.Module) -> bool:
    """Whether a module keeps running statistics by width."""
    return "_bank" in module.__dict__ and isinstance(module, _NormBase)


def only_normalises(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module is a batch norm and no more: one with its own forward may activate too."""
    plain = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return isinstance(module, _BatchNorm) and type(module).forward in plain


def held_tensor(module: nn.Module, name: str) -> Tensor | None:
    """A module's whole parameter or buffer, whatever its width."""
    if name in module._parameters:
        return module._parameters[name]
    return module._buffers.get(name)


@cache
def _narrowed_class(
    plain: type[nn.Module], axes: tuple[tuple[str, tuple[int, ...]], ...], is_norm: bool
) -> type[nn.Module]:
    members: dict[str, Any] = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    for name, indices in axes:
        members[name] = property(_active_part(name, indices))
    if is_norm:
        for name in _RUNNING:
            members[name] = property(_running(name))
    members["__setattr__"] = _setting_active_part(plain, dict(axes))
    members["_apply"] = _apply_to_statistics
    if is_norm:
        members["_load_from_state_dict"] = _loading_statistics(plain)
    members["__reduce_ex__"] = _reduced_to_copy(plain)
    return type(plain.__name__, (plain,), members)


class Views(dict[str, Tensor]):
    """Active parts of a module's tensors at its present width, for passes without gradients.

    Only views are kept, never copies, so that they cannot go stale; a copied or saved module
    starts with none.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Views:
        return Views()

    def __reduce__(self) -> tuple[Any, ...]:
        return Views, ()


class CopyOnly:
    """Goes with what `copy` makes a narrowed module from, and stops what `pickle` would write.

    A narrowed class has no name by which it could be found again, and both ask a module for the
    same thing.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> CopyOnly:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise AnywidthError(
            "a converted network cannot be pickled, nor saved with torch.save(model, path): use "
            "anywidth.save(model, path) and anywidth.load, which keep the statistics of all "
            "widths; what anywidth.extract(model, width) returns can be pickled"
        )


def _reduced_to_copy(plain: type[nn.Module]) -> Callable[[nn.Module, Any], tuple[Any, ...]]:
    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = plain.__reduce_ex__(self, protocol)
        function, arguments, *rest = reduced
        return _copied, (CopyOnly(), function, arguments), *rest

    return reduce_ex


def _copied(_: CopyOnly, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def _active_part(name: str, axes: tuple[int, ...]) -> Callable[[nn.Module], Tensor | None]:
    cuts = [(axis, cut_name(name, axis)) for axis in axes]
    scale = scale_name(name)

    def active_part(self: nn.Module) -> Tensor | None:
        held: Any = self._parameters if name in self._parameters else self._buffers
        if name not in held:
            raise _taken_away(self, name)
        tensor: Tensor | None = held[name]
        if tensor is None:
            return None
        state = self.__dict__
        may_keep = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if may_keep and name in state[VIEWS]:
            view: Tensor = state[VIEWS][name]
            # The view keeps its memory alive, so at one address lies one and the same tensor.
            if _address(view) == _address(tensor):
                return view
        part = tensor
        is_prefix = True
        for axis, attribute in cuts:
            cut = state[attribute]
            if type(cut) is not int:
                part, is_prefix = take(part, axis, cut), False
            elif cut != part.size(axis):
                part = part.narrow(axis, 0, cut)
        factor = state.get(scale, 1.0)
        if factor != 1.0:
            return part * factor
        if may_keep and is_prefix and _address(tensor) is not None:
            state[VIEWS][name] = part
        return part

    return active_part


def _setting_active_part(
    plain: type[nn.Module], axes: dict[str, tuple[int, ...]]
) -> Callable[[nn.Module, str, Any], None]:
    """A buffer that forward assigns anew at a narrow width: its active part alone changes."""

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        is_narrow_norm = name in _RUNNING and not self.__dict__.get("_is_full", True)
        if is_narrow_norm and _set_statistics(self, name, value):
            return
        if name in axes and not _can_hold(self, name, value):
            raise _taken_away(self, name)
        whole = self._buffers.get(name) if name in axes else None
        if whole is None or not isinstance(value, Tensor) or value.shape == whole.shape:
            plain.__setattr__(self, name, value)
            return
        cuts = {axis: self.__dict__[cut_name(name, axis)] for axis in axes[name]}
        if value.shape != _active_shape(whole, cuts):
            plain.__setattr__(self, name, value)
            return
        with torch.no_grad():
            _put(whole, value, cuts)

    return set_attribute


def _can_hold(module: nn.Module, name: str, value: Any) -> bool:
    is_held = name in module._parameters or name in module._buffers
    return is_held or isinstance(value, nn.Parameter)


def _taken_away(module: nn.Module, name: str) -> AnywidthError:
    return AnywidthError(
        f"the {name} of a converted layer ({type(module).__name__}) was taken away: weight norm, "
        "spectral norm, pruning and other parametrizations belong before anywidth.slimmable, and "
        "DistributedDataParallel in place of DataParallel"
    )


def _set_statistics(norm: nn.Module, name: str, value: Any) -> bool:
    """Whether a value fits the present, narrower width's statistics; it has then been put there.

    A width that is not tracked keeps none.
    """
    expected = sliced_statistics(norm, name)
    if expected is None or not isinstance(value, Tensor) or value.shape != expected.shape:
        return False
    entry: Statistics | None = norm.__dict__["_bank"].get(norm.__dict__["_config"])
    if entry is not None:
        with torch.no_grad():
            getattr(entry, name).copy_(value)
    return True


def _active_shape(whole: Tensor, cuts: dict[int, Cut]) -> tuple[int, ...]:
    sizes = {a: c if isinstance(c, int) else sum(n for _, n in c) for a, c in cuts.items()}
    return tuple(sizes.get(axis, size) for axis, size in enumerate(whole.shape))


def _put(whole: Tensor, part: Tensor, cuts: dict[int, Cut]) -> None:
    """Writes the active part, stretch by stretch."""
    if not cuts:
        whole.copy_(part)
        return
    (axis, cut), *rest = cuts.items()
    place = 0
    for start, length in ((0, cut),) if isinstance(cut, int) else cut:
        to, given = whole.narrow(axis, start, length), part.narrow(axis, place, length)
        _put(to, given, dict(rest))
        place += length


def _address(tensor: Tensor) -> int | None:
    """Where a tensor's memory starts; None for one without, as inside `torch.func` or a trace."""
    try:
        return tensor.data_ptr() or None
    except RuntimeError:
        return None


# ---- running statistics ------------------------------------------------------------------------


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


def _apply_to_statistics(
    self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> Any:
    """`model.to(...)`: the statistics of all widths move with the module."""
    self.__dict__[VIEWS].clear()
    for entry in self.__dict__["_bank"].values() if is_switched_norm(self) else ():
        for name in _RUNNING:
            setattr(entry, name, fn(getattr(entry, name)))
    return self.__dict__["_plain_class"]._apply(self, fn, recurse)


def norm_values(
    module: nn.Module, config: ChannelConfig, is_full: bool, label: float | None
) -> dict[str, Any]:
    """What `set_width` writes into a batch norm, besides its cuts."""
    entry: Statistics | None = module.__dict__["_bank"].get(config)
    if entry is not None and entry.label is None:
        entry.label = label
    return {"_config": config, "_is_full": is_full, "_label": label}
