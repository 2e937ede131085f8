"""The knowledge that a trace starts with, and its findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.fx import Node

from anywidth.planning.trace.known_ints import SizeSource
from anywidth.planning.trace.solver import Pieces, Solver, TracedAxis
from anywidth.planning.trace.value import Traced


class Misreading(NamedTuple):
    """An operation that did not behave as guessed in a rehearsal.

    `dim` is the one dimension that narrows, if there is one; `times` counts wrong guesses.
    """

    dim: int | None
    times: int


@dataclass(frozen=True)
class Known:
    """The network, and what earlier passes have shown.

    Args:
        batch: number of examples in the example input.
        misread: results of rehearsals.
        failed: operations at which a narrow network may have failed, and how often.
        positions: (parameter, index of an axis) of axes of tokens or positions, not of channels.
        sources: for an operation, which attributes the sizes that it is given come from.
        numbers: the attribute that a number in an operation was worked out from, if it is known.
        stuck: reshapes in which another dimension should narrow, as that of the guess cannot.
    """

    model: nn.Module
    batch: int = 1
    misread: Mapping[Node, Misreading] = field(default_factory=dict)
    failed: Mapping[Node, int] = field(default_factory=dict)
    positions: frozenset[tuple[str, int]] = frozenset()
    sources: Callable[[Node], Sequence[SizeSource | None]] | None = None
    numbers: Callable[[Node, float], SizeSource | None] | None = None
    stuck: frozenset[Node] = frozenset()


class Maker(NamedTuple):
    """A call of a convolution or linear layer.

    `can_fold`: whether a batch norm after it could be folded into its weight.
    """

    layer: str
    axis: TracedAxis
    node: Node | None
    can_fold: bool


class Follower(NamedTuple):
    """An attribute of a module that follows an axis; one of its entries if it is a tuple.

    With `power` it is `whole` at full width, and follows that power of the size of the axis.
    `is_tried`: only a rehearsal can show that it follows.
    """

    path: str
    attribute: str
    axis: Pieces
    place: int | None = None
    power: float | None = None
    whole: float | None = None
    is_tried: bool = False


class WidthConstant(NamedTuple):
    """A number that depends on how many channels there are, most often a power of their number.

    `source`: the attribute that it was worked out from, if it is no power.
    """

    node: Node
    place: str
    number: float
    axis: Pieces
    power: float = 0.0
    source: SizeSource | None = None


class Product(NamedTuple):
    """Multiply-adds: a constant times the sizes of axes, for the whole batch or without it."""

    layer: str
    factor: int
    axes: tuple[Pieces, ...]
    is_batched: bool


@dataclass
class Findings:
    """What the rules have found so far.

    Args:
        tensors: parameters and buffers by name.
        makers: every call of a convolution or linear layer, in order.
        readers: (layer, input axis) of these calls.
        made: axes that learned weights make, inside or outside a layer.
        summed: axes of parameters that products outside of layers sum over.
        attended: axes of products of two activations: heads, and the axes their scores sum over.
        merged: axes that a reshape merges with others, so that none of them narrows.
        products: the terms of the cost.
        uncounted: operations with weights for which no cost was counted.
        followers: attributes that follow an axis.
        inputs: for each weight that output averaging scales, the index of its input axis.
        moving: operations whose later parts begin at another place in a narrow network.
        folds: (layer, batch norm) in which only the norm reads the layer's output.
        joining: parameters and buffers that are combined with activations, but not as weights.
        notes: remarks for the reader of the plan.
        constants: numbers that should follow the width, which a rehearsal checks.
        staying: numbers that do not follow it, whatever attribute does.
        scales: for each buffer that is a power of an axis's size, the axis and the power.
        reread: operations with a new guess, because a narrow network failed.
        sized: operations whose sizes may come from an attribute that was not tried.
        fresh: variables of new tensors' axes, until they meet channels.
        guesses: operations whose sizes Python computed, with the results that rules guess.
        cuts: reshapes that cut an axis, with the part that narrows by a guess.
    """

    known: Known
    solver: Solver = field(default_factory=Solver)
    tensors: dict[str, Traced] = field(default_factory=dict)
    makers: list[Maker] = field(default_factory=list)
    readers: list[tuple[str, TracedAxis]] = field(default_factory=list)
    made: list[TracedAxis] = field(default_factory=list)
    summed: list[TracedAxis] = field(default_factory=list)
    attended: list[TracedAxis] = field(default_factory=list)
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
    reread: set[Node] = field(default_factory=set)
    sized: set[Node] = field(default_factory=set)
    fresh: set[int] = field(default_factory=set)
    guesses: dict[Node, Any] = field(default_factory=dict)
    cuts: dict[Node, Pieces] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buffers = {name for name, _ in self.known.model.named_buffers()}

    def fresh_axis(self, size: int) -> Pieces:
        """An axis of a new tensor that narrows if it meets channels."""
        axis = self.solver.new(size)
        self.fresh.add(axis[0][0])
        return axis

    def is_fresh(self, axis: TracedAxis) -> bool:
        """Whether an axis belongs to a new tensor and has met no channels yet."""
        return axis is not None and self.fresh.issuperset(self.solver.variables([axis]))

    def is_parameter(self, value: Any) -> bool:
        """Whether a value is a parameter or a view of one, not a buffer or computed."""
        is_held = isinstance(value, Traced) and value.source is not None
        return is_held and value.source not in self.buffers

    def is_constant(self, value: Traced) -> bool:
        """Whether a tensor is a buffer or a view of one, and not computed from anything else."""
        return value.source in self.buffers
