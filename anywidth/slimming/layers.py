"""How a module narrows itself: it sees only the active part of its own parameters.

A narrowed module keeps its parameters as they are and gets a subclass of its own class in which
each of them is a property that returns the active part. Its forward, its hooks and both kinds of
weight norm then work on fewer channels. `torch.nn.utils.parametrize` changes classes in the same
way, but renames entries of `state_dict`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import RECORD, Cut, cut_size, take
from anywidth.slimming.norm_statistics import (
    RUNNING,
    NormRecord,
    keeps_statistics,
    loading_statistics,
    norm_record,
    reading_statistics,
    training_statistics,
)
from anywidth.slimming.pass_hooks import unhook_passes
from anywidth.slimming.record import Record, record_of
from anywidth.slimming.spectral_weights import hooked_vectors, narrow_forward
from anywidth.slimming.unsupported_tools import check_attribute, refuse_scripting

# The child of a batch norm with a scale and bias per switch of a slimmable network. Those tuned
# after training are beside the statistics instead (`norm_statistics.py`).
PRIVATE_AFFINE = "private_affine"


class Kind(NamedTuple):
    """The parts from which the class of a converted module is made."""

    plain: type[nn.Module]
    tensors: tuple[str, ...]
    is_norm: bool
    has_private: bool
    forward: Callable[[Any, Tensor], Tensor] | None


def narrow(module: nn.Module, tensors: Iterable[str]) -> None:
    """Give a module a subclass in which the named tensors can be cut."""
    kind = NormRecord if keeps_statistics(module) else Record
    module.__dict__[RECORD] = kind(type(module), tuple(sorted(tensors)))
    dress(module)


def dress(module: nn.Module) -> None:
    """Give a module the class that fits its record."""
    record: Record = module.__dict__[RECORD]
    norm = norm_record(module)
    has_private = norm is not None and (norm.switches is not None or norm.has_tuned)
    forward = None if record.fast is None else record.fast.forward
    kind = Kind(record.plain, record.tensors, norm is not None, has_private, forward)
    module.__class__ = _changed_class(kind)


def allow_tuned(norm: nn.Module, record: NormRecord) -> None:
    """Have a norm look for a scale and bias tuned for its current width."""
    if not record.has_tuned:
        record.has_tuned = True
        dress(norm)


def widen(module: nn.Module) -> None:
    """Undo `narrow`; the caller restores attributes that were set for a width."""
    record: Record = module.__dict__.pop(RECORD)
    module.__class__ = record.plain
    unhook_passes(module)
    if isinstance(record, NormRecord) and record.switches is not None:
        del module._modules[PRIVATE_AFFINE]


def widen_all(model: nn.Module) -> None:
    for module in model.modules():
        if RECORD in module.__dict__:
            widen(module)


def drop_fast_paths(model: nn.Module) -> None:
    """Restore the forward that every layer had before `fast_layers.use_kernels`."""
    for module in model.modules():
        record = record_of(module)
        if record is not None and record.fast is not None:
            record.fast = None
            if is_narrowed(module):
                dress(module)
            else:  # such as an activation
                widen(module)


def is_narrowed(module: nn.Module) -> bool:
    record = record_of(module)
    return record is not None and bool(record.tensors or isinstance(record, NormRecord))


def only_normalises(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module is a plain batch norm: one with its own forward may also activate."""
    plain = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return isinstance(module, _BatchNorm) and type(module).forward in plain


@cache
def _changed_class(kind: Kind) -> type[nn.Module]:
    plain, is_narrowed = kind.plain, bool(kind.tensors or kind.is_norm)
    name = f"Slimmable{plain.__name__}" if is_narrowed else plain.__name__
    is_graph = issubclass(plain, torch.fx.GraphModule)  # which knows its own classes by that name
    place = plain.__qualname__.removesuffix(plain.__name__)
    members: dict[str, Any] = {
        "__module__": plain.__module__,  # torch.fx recognises torch's layers by it
        "__qualname__": plain.__qualname__ if is_graph else place + name,
        "__reduce_ex__": _reduced(kind),
    }
    if is_narrowed:
        members |= {tensor: property(_active_part(tensor)) for tensor in kind.tensors}
        members["__setattr__"] = _setting_active_part(plain, kind.tensors)
        members["_apply"] = _apply
        members["__prepare_scriptable__"] = refuse_scripting
        members |= hooked_vectors(kind.tensors, _active_part)
    if is_narrowed and issubclass(plain, nn.RNNBase):
        members |= _RECURRENT
    if is_narrowed and issubclass(plain, nn.ParameterList):
        members["__getitem__"] = _listed
    if is_narrowed and issubclass(plain, _SpectralNorm):
        members["forward"] = narrow_forward
    if kind.is_norm:
        members |= {tensor: property(reading_statistics(tensor)) for tensor in RUNNING}
        members["_load_from_state_dict"] = loading_statistics(plain)
        members["train"] = training_statistics(plain)
    if kind.has_private:
        for tensor in ("weight", "bias"):
            shared = members[tensor].fget if tensor in members else None
            members[tensor] = property(_private_part(tensor, shared))
    if kind.forward is not None:
        members["forward"] = kind.forward
    return type(name, (plain,), members)


def _reduced(kind: Kind) -> Callable[[nn.Module, Any], tuple[Any, ...]]:
    """`__reduce_ex__` for `copy` and `pickle`: it uses the plain class.

    Another process could not find the changed class by its name.
    """

    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = kind.plain.__reduce_ex__(self, protocol)
        function, arguments, *rest = reduced
        changed = type(self)
        arguments = tuple(kind.plain if a is changed else a for a in arguments)
        return _remade, (kind, function, arguments), *rest

    return reduce_ex


def _remade(kind: Kind, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    module = function(*arguments)
    module.__class__ = _changed_class(kind)
    return module


def _active_part(name: str) -> Callable[[nn.Module], Tensor | None]:
    def active_part(self: nn.Module) -> Tensor | None:
        held: Any = self._parameters
        if name not in held:
            held = self._buffers
            if name not in held:
                raise _taken_away(self, name)
        tensor: Tensor | None = held[name]
        if tensor is None:
            return None
        record: Record = self.__dict__[RECORD]
        is_eager = not torch.compiler.is_compiling()
        if is_eager and record.use.block is not None:
            record.use.check()
        may_keep = is_eager and not torch.is_grad_enabled()
        if may_keep:
            view = record.views.get(name)
            # The view keeps its memory alive, so an equal address means the same tensor.
            if view is not None and _address(view) == _address(tensor):
                return view
        part = tensor
        is_prefix = True
        for axis, cut in record.cuts[name].items():
            if type(cut) is not int:
                part, is_prefix = take(part, axis, cut), False
            elif cut != part.size(axis):
                part = part.narrow(axis, 0, cut)
        factor = record.scales.get(name, 1.0)
        if factor != 1.0:
            return part * factor
        if may_keep and is_prefix and _address(tensor) is not None:
            record.views[name] = part
        return part

    return active_part


def _listed(self: Any, index: Any) -> Any:
    """`nn.ParameterList[index]`; of a slice, a list of the active parts.

    torch would make another module of them, with parameters of its own that nobody trains.
    """
    if isinstance(index, slice):
        return [self[i] for i in range(len(self))[index]]
    return nn.ParameterList.__getitem__(self, index)


def _private_part(
    name: str, shared: Callable[[nn.Module], Tensor | None] | None
) -> Callable[[nn.Module], Tensor | None]:
    """The private scale or bias of a norm; at other widths the shared one."""

    def private_part(self: nn.Module) -> Tensor | None:
        record: NormRecord = self.__dict__[RECORD]
        tuned = record.tuned(self)
        if tuned is not None:
            part: Tensor | None = getattr(tuned, name)
            return part
        index = None if record.switches is None else record.switches.get(record.config)  # type: ignore[arg-type]
        if index is None:
            # A norm with the same channels at all widths has no active part.
            return self._parameters[name] if shared is None else shared(self)
        own: Tensor = getattr(self._modules[PRIVATE_AFFINE], name)[index]
        return own

    return private_part


def _setting_active_part(
    plain: type[nn.Module], tensors: tuple[str, ...]
) -> Callable[[nn.Module, str, Any], None]:
    """If forward assigns a new buffer at a narrow width, only its active part changes."""

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        record = record_of(self)
        if record is None:  # it is being copied
            plain.__setattr__(self, name, value)
            return
        check_attribute(name)
        if isinstance(record, NormRecord) and record.assign(self, name, value):
            return
        is_held = name in self._parameters or name in self._buffers
        if name in tensors and not (is_held or isinstance(value, nn.Parameter)):
            raise _taken_away(self, name)
        whole = self._buffers.get(name) if name in tensors else None
        if whole is not None and _is_active_part(value, whole, record.cuts.get(name, {})):
            with torch.no_grad():
                _put(whole, value, record.cuts[name])
        else:
            plain.__setattr__(self, name, value)

    return set_attribute


def _taken_away(module: nn.Module, name: str) -> AnywidthError:
    return AnywidthError(
        f"the {name} of a converted layer ({type(module).__name__}) was removed: apply weight "
        "norm, spectral norm, pruning and other parametrizations before anywidth.slimmable, and "
        "use DistributedDataParallel instead of DataParallel"
    )


def _is_active_part(value: Any, whole: Tensor, cuts: dict[int, Cut]) -> bool:
    """Whether a value has the shape of the active part of a tensor, and not that of all of it."""
    if not isinstance(value, Tensor) or value.shape == whole.shape:
        return False
    sizes = {axis: cut_size(cut) for axis, cut in cuts.items()}
    return value.shape == tuple(sizes.get(axis, size) for axis, size in enumerate(whole.shape))


def _put(whole: Tensor, part: Tensor, cuts: dict[int, Cut]) -> None:
    """Write the active part, segment by segment."""
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
    """The address of a tensor's memory; None without memory, as in `torch.func` or a trace."""
    try:
        return tensor.data_ptr() or None
    except RuntimeError:
        return None


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """`model.to(...)`: drop old views, and move the statistics of all widths."""
    record: Record = self.__dict__[RECORD]
    record.views.clear()
    if isinstance(record, NormRecord):
        record.map(fn)
    return record.plain._apply(self, fn, recurse)


# ---- recurrent layers, which keep a list of their weights ---------------------------------------


def _flat_weights(self: Any) -> list[Tensor | None]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _keep_whole(self: Any, _: Any) -> None:
    """The list that a plain layer will have again holds the parameters themselves."""
    self.__dict__["_flat_weights"] = [self._parameters.get(n) for n in self._flat_weights_names]


def _weights_have_changed(self: Any) -> bool:
    return False  # the list is made at each call


def _flatten_parameters(self: Any) -> None:
    """cuDNN wants all weights side by side in memory, which parts of them are not."""
    if all(a is b for a, b in zip(self._flat_weights, self.__dict__["_flat_weights"], strict=True)):
        nn.RNNBase.flatten_parameters(self)


def _set_state(self: Any, state: dict[str, Any]) -> None:
    """A copy is made of parts, which must not be cut again."""
    nn.Module.__setstate__(self, state)
    _keep_whole(self, None)
    kept = self.__dict__["_flat_weights"]
    self.__dict__["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in kept]


_RECURRENT: dict[str, Any] = {
    "_flat_weights": property(_flat_weights, _keep_whole),
    "_weights_have_changed": _weights_have_changed,
    "flatten_parameters": _flatten_parameters,
    "__setstate__": _set_state,
}
