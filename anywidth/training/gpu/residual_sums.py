"""The last norm of a residual block, the sum and the ReLU after it, computed together.

The sum is in the network's own code. So the norm takes its statistics, and returns a tensor that
waits: it has no memory yet. A sum with it waits too, and ReLU computes everything in one pass. Any
other use of it computes what is missing first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from anywidth.errors import AnywidthError
from anywidth.training.gpu import kernels
from anywidth.training.gpu.fast_paths import are_watched

_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_SUMS_IN_PLACE = {Tensor.add_, Tensor.__iadd__}
_RELUS = {F.relu, torch.relu, Tensor.relu}
_RELUS_IN_PLACE = {F.relu_, torch.relu_, Tensor.relu_}
_DESCRIBING = {
    Tensor.size,
    Tensor.dim,
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "is_cuda")),
}


def can_wait(norm: Any, x: Tensor) -> bool:
    """Whether the output of a norm may wait for a sum, and this is faster."""
    is_usual = not (torch.is_inference_mode_enabled() or are_watched(norm))
    return is_usual and not kernels.has_few_pixels(x)


class Waiting(Tensor):
    """A norm's output, or its sum with another tensor, that is not computed yet."""

    _inputs: list[tuple[Tensor, int]]
    _norm: kernels.DeferredNorm
    _has_gradients: bool
    _done: Tensor | None

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        named = named or {}
        if function in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **named)
        if function in _SUMS or function in _SUMS_IN_PLACE:
            if len(arguments) == 2 and not named:
                one, other = arguments
                summed = _summed(one, other, function in _SUMS_IN_PLACE)
                if summed is not None:
                    return summed
        elif function in _RELUS or function in _RELUS_IN_PLACE:
            is_in_place = function in _RELUS_IN_PLACE or bool(named.get("inplace"))
            if _can_go_on(arguments[0], inputs=2):
                return _finished(arguments[0], "relu", is_in_place)
        plain = tree_map_only(Waiting, computed, (tuple(arguments), dict(named)))
        return function(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(cls, *unused: Any, **named: Any) -> NoReturn:
        _refuse()


def waiting(x: Tensor, norm: kernels.DeferredNorm) -> Tensor:
    """The output of a norm of `x`, which is computed later."""
    return _new([(x, x._version)], norm)


def computed(one: Waiting) -> Tensor:
    """The tensor itself."""
    return _finished(one, "none", True) if one._done is None else one._done


def _new(inputs: list[tuple[Tensor, int]], norm: kernels.DeferredNorm) -> Waiting:
    like = inputs[0][0]
    needs = torch.is_grad_enabled()
    with torch._C.DisableTorchFunctionSubclass():
        made: Waiting = Tensor._make_wrapper_subclass(
            Waiting,
            like.shape,
            strides=like.stride(),
            dtype=like.dtype,
            device=like.device,
            requires_grad=needs,
        )
        if needs:
            # Code that takes it for an ordinary tensor would end the gradient's way here.
            made.register_hook(_refuse)
    made._inputs, made._norm, made._has_gradients, made._done = inputs, norm, needs, None
    return made


def _can_go_on(one: Any, inputs: int) -> bool:
    """Whether something still waits, for a sum (1 input) or for what follows one (2 inputs)."""
    if not isinstance(one, Waiting) or one._done is not None or len(one._inputs) != inputs:
        return False
    return one._has_gradients == torch.is_grad_enabled()


def _summed(one: Any, other: Any, is_in_place: bool) -> Waiting | None:
    """The sum of two tensors, one of which waits; None if it has to be computed as usual."""
    if not _can_go_on(one, inputs=1) and not is_in_place:
        one, other = other, one
    if not _can_go_on(one, inputs=1) or not isinstance(other, Tensor):
        return None
    other = computed(other) if isinstance(other, Waiting) else other
    if not _can_go_on(one, inputs=1) or type(other) is not Tensor:
        return None  # both were one tensor, or a class of its own has something to say
    x = one._inputs[0][0]
    if any(getattr(other, name) != getattr(x, name) for name in ("shape", "dtype", "device")):
        return None
    inputs = [one._inputs[0], (other, other._version)]
    if not is_in_place:
        return _new(inputs, one._norm)
    one._inputs = inputs
    return one


def _finished(one: Waiting, activation: str, is_in_place: bool) -> Tensor:
    """Compute what waits; it is the tensor's own value unless an activation makes another one."""
    if any(tensor._version != version for tensor, version in one._inputs):
        raise AnywidthError(
            "a tensor of a residual sum was changed in place before the sum was read. Train the "
            "network with SandwichStep(..., kernels=False)"
        )
    with torch._C.DisableTorchFunctionSubclass():
        if not one.is_leaf or one.requires_grad != one._has_gradients:
            _refuse()  # a function with a gradient of its own has returned it
    x, *others = (tensor for tensor, _ in one._inputs)
    with torch.set_grad_enabled(one._has_gradients):
        other = others[0].contiguous(memory_format=torch.channels_last) if others else None
        done = kernels.norm_and_sum(x, one._norm, other, activation)
    if is_in_place:
        one._done, one._inputs = done, []
    return done


def _refuse(*unused: Any) -> NoReturn:
    raise AnywidthError(
        "the output of a batch norm was used by code that PyTorch cannot see, where a residual sum "
        "was expected. Train the network with SandwichStep(..., kernels=False)"
    )
