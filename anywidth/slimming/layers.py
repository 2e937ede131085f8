"""How a module narrows itself: it sees only the active part of its own parameters.

A narrowed module keeps its parameters as they are and gets a subclass of its own class in which
each of them is a property that returns the active part. Its forward, its hooks and both kinds of
weight norm then work on fewer channels without knowing of it. `torch.nn.utils.parametrize` does
the same to a class; unlike there, nothing in `state_dict` is renamed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import PREFIX, Cut, cut_name, scale_name, take
from anywidth.slimming.norm_statistics import (
    assign_statistics,
    is_switched_norm,
    keeps_statistics,
    map_statistics,
    switch_norm,
    switched_members,
    unswitch_norm,
)

VIEWS = f"{PREFIX}views"

# The child of a batch norm that has a scale and bias for each switch of a slimmable network.
PRIVATE_AFFINE = "private_affine"


def narrow(module: nn.Module, axes: dict[str, tuple[int, ...]]) -> None:
    """Gives a module the subclass in which the named tensors' named axes can be cut."""
    is_norm = keeps_statistics(module)
    key = tuple(sorted(axes.items()))
    module.__dict__["_plain_class"] = type(module)
    module.__dict__[VIEWS] = Views()
    if is_norm:
        switch_norm(module)
    module.__class__ = _narrowed_class(type(module), key, is_norm)  # type: ignore[arg-type]


def widen(module: nn.Module) -> None:
    """Undoes `narrow`; attributes set for a width are left for the caller to restore."""
    if is_switched_norm(module):
        unswitch_norm(module)
    module.__class__ = module.__dict__.pop("_plain_class")
    for name in [name for name in module.__dict__ if name.startswith(PREFIX)]:
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


def only_normalises(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module is a batch norm and no more: one with its own forward may activate too."""
    plain = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return isinstance(module, _BatchNorm) and type(module).forward in plain


@cache
def _narrowed_class(
    plain: type[nn.Module], axes: tuple[tuple[str, tuple[int, ...]], ...], is_norm: bool
) -> type[nn.Module]:
    members: dict[str, Any] = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    for name, indices in axes:
        members[name] = property(_active_part(name, indices))
    members["__setattr__"] = _setting_active_part(plain, dict(axes), is_norm)
    members["_apply"] = _apply
    if is_norm:
        members |= switched_members(plain)
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
    plain: type[nn.Module], axes: dict[str, tuple[int, ...]], is_norm: bool
) -> Callable[[nn.Module, str, Any], None]:
    """A buffer that forward assigns anew at a narrow width: its active part alone changes."""

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if is_norm and assign_statistics(self, name, value):
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


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """`model.to(...)`: views of what was are of no use, and statistics of all widths go too."""
    self.__dict__[VIEWS].clear()
    if is_switched_norm(self):
        map_statistics(self, fn)
    return self.__dict__["_plain_class"]._apply(self, fn, recurse)
