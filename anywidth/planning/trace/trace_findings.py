"""The knowledge that a trace starts with, and its findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.fx import Node

from anywidth.planning.trace.known_ints import SizeSource
from anywidth.planning.trace.solver import Pieces, Solver, TracedAxis
from anywidth.planning.trace.value import Traced

if TYPE_CHECKING:
    from anywidth.planning.trace.size_sources import SizeSources


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
        sources: the attributes that sizes and numbers in operations come from.
        misread: results of rehearsals.
        failed: operations at which a narrow network may have failed, and how often.
        positions: (parameter, index of an axis) of axes of tokens or positions, not of channels.
        stuck: reshapes in which another dimension should narrow, as that of the guess cannot.
    """

    model: nn.Module
    batch: int
    sources: SizeSources
    misread: Mapping[Node, Misreading] = field(default_factory=dict)
    failed: Mapping[Node, int] = field(default_factory=dict)
    positions: frozenset[tuple[str, int]] = frozenset()
    stuck: frozenset[Node] = frozenset()


class Maker(NamedTuple):
    """A call of a convolution or linear layer.

    `can_fold`: whether a batch norm after it could be folded into its weight.
    """

    layer: str
    axis: TracedAxis
    node: Node
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


class Findings:
    """What the rules have found so far."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.solver = Solver()
        self.buffers = {name for name, _ in known.model.named_buffers()}
        self.tensors: dict[str, Traced] = {}  # parameters and buffers by name
        self.makers: list[Maker] = []  # every call of a convolution or linear layer, in order
        self.readers: list[tuple[str, TracedAxis]] = []  # (layer, input axis) of these calls
        self.made: list[TracedAxis] = []  # axes that learned weights make, inside layers or not
        # Axes of parameters that products outside of layers sum over.
        self.summed: list[TracedAxis] = []
        # Axes of products of two activations: heads, and the axes their scores sum over.
        self.attended: list[TracedAxis] = []
        self.merged: list[TracedAxis] = []  # axes that a reshape merges, so that none narrows
        self.products: list[Product] = []  # the terms of the cost
        self.uncounted: list[str] = []  # operations with weights for which no cost was counted
        self.followers: list[Follower] = []  # attributes that follow an axis
        # For each weight that output averaging scales, the index of its input axis.
        self.inputs: dict[str, int] = {}
        # Operations whose later parts begin at another place in a narrow network.
        self.moving: list[str] = []
        self.folds: list[tuple[str, str]] = []  # (layer, batch norm) if only the norm reads it
        # Parameters and buffers that are combined with activations, but not as weights.
        self.joining: set[str] = set()
        self.notes: list[str] = []  # remarks for the reader of the plan
        # Numbers that should follow the width, which a rehearsal checks.
        self.constants: list[WidthConstant] = []
        self.staying: list[WidthConstant] = []  # those that do not, whatever attribute does
        # For each buffer that is a power of an axis's size, the axis and the power.
        self.scales: dict[str, tuple[Pieces, float]] = {}
        self.reread: set[Node] = set()  # operations with a new guess after a narrow network failed
        # Operations whose sizes may come from an attribute that was not tried.
        self.sized: set[Node] = set()
        self.fresh: set[int] = set()  # variables of new tensors' axes, until they meet channels
        # Operations whose sizes Python computed, with the results that rules guess.
        self.guesses: dict[Node, Any] = {}
        # Reshapes that cut an axis, with the part that narrows by a guess.
        self.cuts: dict[Node, Pieces] = {}

    def fresh_axis(self, size: int) -> Pieces:
        """An axis of a new tensor that narrows if it meets channels."""
        axis = self.solver.new(size)
        self.fresh.add(axis[0][0])
        return axis

    def is_fresh(self, axis: TracedAxis) -> bool:
        """Whether an axis belongs to a new tensor and has met no channels yet."""
        return axis is not None and self.fresh.issuperset(self.solver.variables([axis]))

    def layers_by_variable(self, listed: Iterable[tuple[str, TracedAxis]]) -> dict[int, list[str]]:
        """For each variable the layers that are listed with an axis of it."""
        layers: dict[int, list[str]] = {}
        for layer, axis in listed:
            for variable, _ in self.solver.pieces(axis):
                if layer not in layers.setdefault(variable, []):
                    layers[variable].append(layer)
        return layers

    def is_parameter(self, value: Any) -> bool:
        """Whether a value is a parameter or a view of one, not a buffer or computed."""
        is_held = isinstance(value, Traced) and value.source is not None
        return is_held and value.source not in self.buffers

    def is_constant(self, value: Traced) -> bool:
        """Whether a tensor is a buffer or a view of one, and not computed from anything else."""
        return value.source in self.buffers
