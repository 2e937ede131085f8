"""What a rule sees of a traced tensor, and what it may say about it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from anywidth.planning.trace.solver import Pieces, Solver, TracedAxis, Unsplittable


@dataclass(frozen=True)
class Traced:
    """A tensor of the exported graph: its full shape, and what each of its axes is made of.

    `scale_name` is the parameter to scale if the tensor as a whole is to be scaled.
    """

    shape: tuple[int, ...]
    axes: tuple[TracedAxis, ...]
    scale_name: str | None = None


@dataclass(frozen=True)
class Misreading:
    """An operation that a rehearsal found to do other than guessed.

    `dim` is the one dimension that narrows, if there is one; `times` how often a guess was wrong.
    """

    dim: int | None
    times: int


@dataclass
class Context:
    """The state of one trace; rules report through it."""

    model: nn.Module
    batch: int = 1
    buffers: frozenset[str] = frozenset()
    misread: dict[Node, Misreading] = field(default_factory=dict)
    # Operations whose sizes were worked out in Python, with the results that rules guess.
    guesses: dict[Node, Any] = field(default_factory=dict)
    solver: Solver = field(default_factory=Solver)
    # (layer, output axis) of every convolution and linear layer, in order.
    makers: list[tuple[str, TracedAxis]] = field(default_factory=list)
    readers: list[tuple[str, TracedAxis]] = field(default_factory=list)
    # Axes that learned weights make, whether in a layer or not.
    made: list[TracedAxis] = field(default_factory=list)
    # Axes of parameters that products outside of layers sum over.
    summed: list[TracedAxis] = field(default_factory=list)
    # Axes that a reshape merges with others, so that neither narrows.
    merged: list[TracedAxis] = field(default_factory=list)
    # (parameter, index of an axis) that tokens or positions lie along, not channels.
    positions: frozenset[tuple[str, int]] = frozenset()
    # Operations with weights that no cost was counted for.
    uncounted: list[str] = field(default_factory=list)
    # (layer, constant factor, elastic axes, whether it is done once an example).
    costs: list[tuple[str, int, tuple[Pieces, ...], bool]] = field(default_factory=list)
    # (module, attribute, axis it follows, place in the attribute if that is a tuple).
    attributes: list[tuple[str, str, Pieces, int | None]] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    # Operations whose later parts begin elsewhere in the whole network than in a narrow one.
    moving: list[str] = field(default_factory=list)
    # (layer, batch norm) where nothing but the norm reads the layer's output.
    folds: list[tuple[str, str]] = field(default_factory=list)
    # (batch norm, activation) where nothing but the activation reads the norm's output.
    activations: list[tuple[str, str]] = field(default_factory=list)
    # Whether a norm of the present layer's output could be merged into the weight it holds.
    is_foldable: bool = False
    node: Node | None = None
    op: str = ""
    layer: str = ""
    meta: Any = None
    # Whether the present operation depends on the network's input, or on parameters alone.
    is_batched: bool = True

    @property
    def place(self) -> str:
        """The present operation, and the layer it is in."""
        return f"{self.op} of {self.layer}" if self.layer else self.op

    @property
    def reason(self) -> str:
        """Why the present operation keeps an axis from narrowing."""
        return f"meets an axis of constant size in {self.place}"

    @property
    def uneven(self) -> str:
        """Why an axis stays that the present operation would cut where no channel ends."""
        return f"cut inside a unit by {self.place}"

    def output(self, axes: Sequence[TracedAxis]) -> Traced:
        """The present operation's result, its shape read from the graph."""
        shape = shape_of(self.meta)
        return Traced(shape, tuple(a if n > 1 else None for a, n in zip(axes, shape, strict=True)))

    def outputs(self, axes: Sequence[TracedAxis]) -> Any:
        """The same for an operation that may return several tensors of one shape."""
        if isinstance(self.meta, torch.Tensor):
            return self.output(axes)
        return [dataclasses.replace(self, meta=meta).output(axes) for meta in self.meta]

    def unify(self, first: TracedAxis, second: TracedAxis) -> TracedAxis:
        return self.solver.unify(first, second, self.reason, self.uneven)

    def fix_all(self, values: Sequence[Any], reason: str) -> None:
        for value in values:
            if isinstance(value, Traced):
                for axis in value.axes:
                    self.solver.fix(axis, reason)
            elif isinstance(value, list | tuple):
                self.fix_all(value, reason)

    def broadcast(self, values: Sequence[Any], shape: Sequence[int]) -> list[TracedAxis]:
        """Axes of an elementwise result: what meets must shrink together."""
        axes: list[TracedAxis] = [None] * len(shape)
        for position in range(1, len(shape) + 1):
            met = [
                v.axes[-position]
                for v in values
                if isinstance(v, Traced)
                and len(v.shape) >= position
                and v.shape[-position] == shape[-position] > 1
            ]
            for axis in met[1:]:
                self.unify(met[0], axis)
            if met and met[0] is not None:
                axes[-position] = self.live(met[0])
        return axes

    def live(self, axis: TracedAxis) -> TracedAxis:
        return None if axis is None else self.solver.expand(axis)

    def is_learned(self, value: Traced) -> bool:
        """Whether a tensor is a parameter, or (for all one knows) computed from one."""
        return value.scale_name not in self.buffers

    def is_weight(self, value: Any) -> bool:
        """Whether an argument is a parameter that could be multiplied with, or holds one."""
        if isinstance(value, list | tuple):
            return any(self.is_weight(item) for item in value)
        is_held = isinstance(value, Traced) and value.scale_name is not None
        return is_held and self.is_learned(value) and len(value.shape) > 1

    def guess(self) -> None:
        """Has the present operation's result checked by a rehearsal."""
        if self.node is not None:
            self.guesses[self.node] = None

    def misreading(self) -> Misreading | None:
        """What a rehearsal showed of the present operation, where its result was guessed wrong."""
        return None if self.node is None else self.misread.get(self.node)

    def attribute(self, name: str, axis: TracedAxis, place: int | None = None) -> None:
        """Lets an attribute of the present module follow an axis, if the module has it."""
        held = vars(self.model.get_submodule(self.layer)).get(name)
        if axis is not None and held is not None:
            self.bind(self.layer, name, axis, None if isinstance(held, int) else place)

    def bind(self, path: str, name: str, axis: Pieces, place: int | None = None) -> None:
        """Has an attribute follow an axis, and all axes it follows shrink together.

        It is one number, however many operations read it.
        """
        module = self.model.get_submodule(path)
        for other, known, followed, at in self.attributes:
            if (known, at) == (name, place) and self.model.get_submodule(other) is module:
                self.unify(followed, axis)
        self.attributes.append((path, name, axis, place))

    def cost(self, value: Traced, inner: Sequence[tuple[int, TracedAxis]], times: int = 1) -> None:
        """Counts the multiply-adds of a product: its result, times the axes summed over."""
        factor, elastic = times, []
        for size, axis in [*zip(value.shape, value.axes, strict=True), *inner]:
            if axis is None:
                factor *= size
            else:
                elastic.append(axis)
        self.costs.append((self.layer, factor, tuple(elastic), self.is_batched))

    def parts(self, axis: Pieces, sizes: Sequence[int]) -> list[TracedAxis] | None:
        """Consecutive parts: equal ones, or some that end where pieces of the axis do."""
        if len(set(sizes)) == 1:
            return self.equal_parts(axis, len(sizes))
        ends = set(itertools.accumulate(self.solver.size((p,)) for p in self.solver.expand(axis)))
        if ends.issuperset(itertools.accumulate(sizes)):
            return list(self.solver.cut(axis, sizes))
        return None

    def equal_parts(self, axis: Pieces, count: int) -> list[TracedAxis]:
        """`count` equal parts of an axis that a layer will cut anew at every width."""
        size = self.solver.size(axis)
        try:
            parts = self.solver.cut(axis, [size // count] * count)
        except Unsplittable:
            pieces = self.solver.expand(axis)
            if len(pieces) == 1 and pieces[0][1] % count == 0:
                self.moving.append(self.place)
                return [((pieces[0][0], pieces[0][1] // count),)] * count
            self.solver.fix(axis, self.uneven)
            return [None] * count
        for part in parts[1:]:
            self.unify(parts[0], part)
        return [self.solver.expand(part) for part in parts]


def shape_of(value: Any) -> tuple[int, ...]:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"not a tensor in the exported graph: {type(value)}")
    return tuple(int(n) for n in value.shape)
