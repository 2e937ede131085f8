"""What conversion keeps on a module: one record, under one private name in its `__dict__`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from anywidth.planning.cuts import RECORD, Cut

if TYPE_CHECKING:
    from anywidth.slimming.state import SlimmableState


class Views(dict[str, Tensor]):
    """Active parts of a module's tensors at its present width, for passes without gradients.

    Only views are kept, never copies, so that they cannot go stale; a copied or pickled module
    starts with none.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Views:
        return Views()

    def __reduce__(self) -> tuple[Any, ...]:
        return Views, ()


@dataclass(eq=False)
class FastPath:
    """How a layer runs on a GPU, and the layers it shares its passes over memory with.

    Args:
        forward: what the layer runs in place of its class's own.
        activation: of a norm: the kind of activation it does too, and the module it does it for.
        read_by: of a norm: the convolution that may do the norm's work.
        norm_after: of a convolution: the norm whose statistics it may take.
        awaits: of a convolution: whether a norm has just left its work to it.
    """

    forward: Callable[[Any, Tensor], Tensor]
    activation: tuple[str, nn.Module] | None = None
    read_by: nn.Module | None = None
    norm_after: nn.Module | None = None
    awaits: bool = False


class Record:
    """What conversion keeps on one module; `norm_statistics.NormRecord` is that of a norm.

    Args:
        plain: the module's own class.
        tensors: the parameters and buffers of which the module sees the active part.
    """

    def __init__(self, plain: type[nn.Module], tensors: tuple[str, ...] = ()) -> None:
        self.plain = plain
        self.tensors = tensors
        self.cuts: dict[str, dict[int, Cut]] = {}  # of each tensor, by axis
        self.scales: dict[str, float] = {}  # what a tensor is multiplied by (output averaging)
        self.views = Views()
        self.fast: FastPath | None = None
        self.network: SlimmableState | None = None  # of the module that was converted as a whole

    def cut(self, tensor: str, axis: int) -> Cut | None:
        """What is active of one axis; None where it always is as a whole."""
        return self.cuts.get(tensor, {}).get(axis)

    def set(self, cuts: dict[str, dict[int, Cut]], scales: dict[str, float]) -> None:
        """Runs the module at another width from now on."""
        self.cuts, self.scales = cuts, scales
        self.views.clear()


def record_of(module: nn.Module) -> Record | None:
    """The record of a module that conversion has changed; None for any other."""
    return module.__dict__.get(RECORD)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """A module's own class, also where it was given another."""
    record = record_of(module)
    return type(module) if record is None else record.plain
