"""What a trace knows when it begins, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.fx import Node

from anywidth.planning.trace.solver import Pieces, Solver, TracedAxis
from anywidth.planning.trace.value import Traced


class Misreading(NamedTuple):
    """An operation that a rehearsal found to do other than guessed.

    `dim` is the one dimension that narrows, if there is one; `times` how often a guess was wrong.
    """

    dim: int | None
    times: int


@dataclass(frozen=True)
class Known:
    """The network, and what was learned about it before.

    Args:
        batch: how many examples there are in the example input.
        misread: what rehearsals showed.
        positions: (parameter, index of an axis) that tokens or positions lie along, not channels.
    """

    model: nn.Module
    batch: int = 1
    misread: Mapping[Node, Misreading] = field(default_factory=dict)
    positions: frozenset[tuple[str, int]] = frozenset()


class Maker(NamedTuple):
    """A call of a convolution or linear layer.

    `can_fold` says whether a batch norm of its output could be merged into the weight it holds.
    """

    layer: str
    axis: TracedAxis
    node: Node | None
    can_fold: bool


class Follower(NamedTuple):
    """An attribute of a module that follows an axis; one of its entries if it is a tuple.

    With `power` it is `whole` at full width, and goes with that power of the axis's size.
    """

    path: str
    attribute: str
    axis: Pieces
    place: int | None = None
    power: float | None = None
    whole: float | None = None


class WidthConstant(NamedTuple):
    """A number that multiplies or divides channels, and is a power of how many there are."""

    node: Node
    place: str
    number: float
    axis: Pieces
    power: float


class Product(NamedTuple):
    """Multiply-adds: a constant times the sizes of axes, for all examples or for none."""

    layer: str
    factor: int
    axes: tuple[Pieces, ...]
    is_batched: bool


@dataclass
class Findings:
    """What rules have said so far.

    Args:
        tensors: parameters and buffers by name.
        makers: every call of a convolution or linear layer, in order.
        readers: (layer, input axis) of those.
        made: axes that learned weights make, in a layer or not.
        summed: axes of parameters that products outside of layers sum over.
        merged: axes that a reshape merges with others, so that neither narrows.
        products: what is counted as cost.
        uncounted: operations with weights for which no cost was counted.
        followers: attributes that follow an axis.
        inputs: for each weight that output averaging scales, the index of its input axis.
        moving: operations whose later parts begin elsewhere in the whole network than in a narrow
            one.
        folds: (layer, batch norm) where nothing but the norm reads the layer's output.
        joining: parameters and buffers that meet what depends on the input, not as a weight of it.
        notes: what a reader of the plan should know.
        constants: numbers that a rehearsal should see follow the width.
        staying: those that do not, whatever attribute follows.
        scales: for each buffer that is a power of an axis's size, the axis and the power.
        guesses: operations whose sizes were worked out in Python, with the results rules guess.
    """

    known: Known
    solver: Solver = field(default_factory=Solver)
    tensors: dict[str, Traced] = field(default_factory=dict)
    makers: list[Maker] = field(default_factory=list)
    readers: list[tuple[str, TracedAxis]] = field(default_factory=list)
    made: list[TracedAxis] = field(default_factory=list)
    summed: list[TracedAxis] = field(default_factory=list)
    merged: list[TracedAxis] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    uncounted: list[str] = field(default_factory=list)
    followers: list[Follower] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    moving: list[str] = field(default_factory=list)
    folds: list[tuple[str, str]] = field(default_factory=list)
    joining: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    constants: list[WidthConstant] = field(default_factory=list)
    staying: list[WidthConstant] = field(default_factory=list)
    scales: dict[str, tuple[Pieces, float]] = field(default_factory=dict)
    guesses: dict[Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buffers = {name for name, _ in self.known.model.named_buffers()}

    def is_parameter(self, value: Any) -> bool:
        """Whether a value is a parameter or a view of one; not a buffer, nor computed."""
        is_held = isinstance(value, Traced) and value.source is not None
        return is_held and value.source not in self.buffers

    def is_constant(self, value: Traced) -> bool:
        """Whether a tensor is a buffer or a view of one, and not computed from anything else."""
        return value.source in self.buffers
