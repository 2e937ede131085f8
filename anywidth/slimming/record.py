"""The record of a converted module, under one private name in its `__dict__`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from anywidth.planning.cuts import RECORD, Cut
from anywidth.slimming.thread_use import ThreadUse

if TYPE_CHECKING:
    from anywidth.slimming.state import SlimmableState


class Views(dict[str, Tensor]):
    """The active parts of a module's tensors at its current width, for passes without gradients.

    Only views are kept, never copies, so they cannot become stale; a copied or pickled module
    starts without any.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return Views, ()


@dataclass(eq=False)
class FastPath:
    """The forward of a layer on a GPU, and the layers with which it shares passes over memory.

    Args:
        forward: replaces the forward of the layer's class.
        activation: for a norm: the activation that it includes, and that activation's module.
        read_by: for a norm: the convolution that may compute the norm.
        is_summed: for a norm: whether a sum alone reads its output and may compute it.
        norm_after: for a convolution: the norm whose statistics it may compute.
        awaits: for a convolution: whether a norm has just been left to it.
        has_taken: for a convolution: whether it has computed the norm that was left to it.
    """

    forward: Callable[[Any, Tensor], Tensor]
    activation: tuple[str, nn.Module] | None = None
    read_by: nn.Module | None = None
    is_summed: bool = False
    norm_after: nn.Module | None = None
    awaits: bool = False
    has_taken: bool = False


UNUSED = ThreadUse()
"""Of modules that are not part of a network yet."""


@dataclass(eq=False, repr=False)
class Record:
    """The record of one converted module; norms have a `norm_statistics.NormRecord`.

    Args:
        plain: the module's own class.
        tensors: parameters and buffers of which the module sees only the active part.
    """

    plain: type[nn.Module]
    tensors: tuple[str, ...] = ()
    cuts: dict[str, dict[int, Cut]] = field(default_factory=dict)  # of each tensor, by axis
    scales: dict[str, float] = field(default_factory=dict)  # factors of tensors (output averaging)
    views: Views = field(default_factory=Views)
    use: ThreadUse = UNUSED
    fast: FastPath | None = None
    network: SlimmableState | None = None  # only for the root of the converted network

    def cut(self, tensor: str, axis: int) -> Cut | None:
        """The active part of one axis; None if it is always whole."""
        return self.cuts.get(tensor, {}).get(axis)

    def set(self, cuts: dict[str, dict[int, Cut]], scales: dict[str, float]) -> None:
        """Set the module to another width."""
        self.cuts, self.scales = cuts, scales
        self.views.clear()


def record_of(module: nn.Module) -> Record | None:
    """The record of a converted module; None for any other."""
    return module.__dict__.get(RECORD)


def network_state(module: nn.Module) -> SlimmableState | None:
    """The state of a converted network; None for its layers, and for any other module."""
    record = record_of(module)
    return None if record is None else record.network


def plain_class(module: nn.Module) -> type[nn.Module]:
    """A module's own class, also if conversion gave it another."""
    record = record_of(module)
    return type(module) if record is None else record.plain
