"""Switchable batch norm with private scale and bias: the slimmable networks the paper builds on.

A slimmable network (S-Net) runs at a few widths, its switches, each with its own batch-norm
statistics (`track_statistics`). Here each switch gets its own scale and bias too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.slimming.convert import at_width
from anywidth.slimming.layers import PRIVATE_AFFINE
from anywidth.slimming.norm_statistics import is_switched_norm
from anywidth.slimming.state import state_of
from anywidth.width import Width


class PrivateAffine(nn.Module):
    """Scale and bias of one batch norm at each switch; at full width the norm's own serve."""

    def __init__(self, sizes: Sequence[int], like: Tensor) -> None:
        super().__init__()
        self.weight = nn.ParameterList([nn.Parameter(like.new_ones(size)) for size in sizes])
        self.bias = nn.ParameterList([nn.Parameter(like.new_zeros(size)) for size in sizes])


def add_private_affine(model: nn.Module, switches: Sequence[Width]) -> None:
    """Gives every batch norm of a converted network a scale and bias for each switch.

    They are ordinary parameters of the network, named `<norm>.private_affine.weight.<i>`.
    """
    state = state_of(model)
    configs = [state.resolve(width) for width in switches]
    narrow = [config for config in configs if config != state.plan.full]
    norms = [
        m
        for m in model.modules()
        if is_switched_norm(m) and m._parameters.get("weight") is not None
    ]
    if not norms:
        raise AnywidthError("this network has no batch norm with a scale, so there is none to add")
    for norm in norms:
        sizes = []
        for config in narrow:
            with at_width(model, config):
                sizes.append(int(norm.num_features))  # type: ignore[arg-type]
        like = norm._parameters["weight"]
        assert like is not None
        norm.add_module(PRIVATE_AFFINE, PrivateAffine(sizes, like.detach()))
        norm.__dict__["_switches"] = {config: i for i, config in enumerate(narrow)}
        norm.__class__ = _private_class(type(norm))  # type: ignore[arg-type]


@cache
def _private_class(shared: type[nn.Module]) -> type[nn.Module]:
    members = {"__module__": shared.__module__, "__qualname__": shared.__qualname__}
    for name in ("weight", "bias"):
        members[name] = property(_private(name, shared))  # type: ignore[assignment]
    return type(shared.__name__, (shared,), members)


def _private(name: str, shared: type[nn.Module]) -> Callable[[nn.Module], Tensor | None]:
    narrowed = getattr(shared, name, None)

    def private(self: nn.Module) -> Tensor | None:
        index = self.__dict__["_switches"].get(self.__dict__["_config"])
        if index is None:
            # A norm whose channels are the same at all widths has no active part.
            return self._parameters[name] if narrowed is None else narrowed.fget(self)
        held = getattr(self._modules[PRIVATE_AFFINE], name)
        own: Tensor = held[index]
        return own

    return private
