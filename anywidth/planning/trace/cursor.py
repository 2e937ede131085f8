"""The operation that a trace is at: what a rule sees of it, and how the rule reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import Node

from anywidth.planning.held_numbers import held_numbers
from anywidth.planning.trace.known_ints import SizeSource
from anywidth.planning.trace.solver import Pieces, Solver, TracedAxis, Unsplittable, scaled
from anywidth.planning.trace.trace_findings import Findings, Follower, Maker, Misreading, Product
from anywidth.planning.trace.value import Traced, as_constant, shape_of

Guessed = TypeVar("Guessed")
# The beginning of a reason to stay whole.
MEETS_CONSTANT = "meets an axis of constant size"


@dataclass(frozen=True)
class Reporter:
    """Tells the findings what shrinks with what.

    Args:
        found: what has been found up to here.
        op: the name of the operation that shows it.
        layer: the module it is called in.
    """

    found: Findings
    op: str
    layer: str

    @property
    def solver(self) -> Solver:
        return self.found.solver

    @property
    def module(self) -> nn.Module:
        """The module around the operation."""
        return self.found.known.model.get_submodule(self.layer)

    @property
    def place(self) -> str:
        """The operation, and the layer it is in."""
        return f"{self.op} of {self.layer}" if self.layer else self.op

    def unify(self, first: TracedAxis, second: TracedAxis) -> TracedAxis:
        constant = f"{MEETS_CONSTANT} in {self.place}"
        return self.solver.unify(first, second, constant, self.uneven)

    def fix(self, values: Any, reason: str) -> None:
        """Fix every axis of a tensor, or of several tensors."""
        if isinstance(values, Traced):
            for axis in values.axes:
                self.solver.fix(axis, reason)
        elif isinstance(values, list | tuple):
            for value in values:
                self.fix(value, reason)

    @property
    def uneven(self) -> str:
        """Why an axis stays that the operation would cut inside a channel."""
        return f"cut inside a unit by {self.place}"

    def follow(self, source: SizeSource, axis: TracedAxis) -> None:
        """Let the attribute that a size comes from follow the axis of this size."""
        times, parts = source.ratio.numerator, source.ratio.denominator
        pieces = self.solver.pieces(axis)
        if not pieces:
            return
        if times > 1:
            found = self.solver.new(self.solver.size(axis) // times)
            # An axis of several pieces was joined: it repeats what the attribute counts.
            joined = found * times if len(pieces) > 1 else scaled(found, times)
            self.unify(axis, joined)
            pieces = found
        axis = pieces * parts
        self.bind(Follower(source.path, source.name, axis, source.place, is_tried=True))

    def bind(self, new: Follower) -> None:
        """Let an attribute follow an axis; all axes that it follows shrink together.

        It is one number, however many operations read it.
        """
        model = self.found.known.model
        module = model.get_submodule(new.path)
        for other in self.found.followers:
            is_same = (other.attribute, other.place) == (new.attribute, new.place)
            if is_same and model.get_submodule(other.path) is module:
                are_fresh = self.found.is_fresh(other.axis) and self.found.is_fresh(new.axis)
                self.unify(other.axis, new.axis)
                if are_fresh:
                    self.found.fresh |= self.solver.variables([new.axis])
        self.found.followers.append(new)


@dataclass(frozen=True)
class Cursor(Reporter):
    """One operation of the graph.

    Args:
        meta: its results, as the graph shows them.
        node: its place in the graph.
        values: the results of the operations up to it.
        is_batched: whether it depends on the network's input, not only on parameters.
        leaves: whether its result, or an index that it returns, is part of the network's output:
            there is no product in between.
    """

    meta: Any
    node: Node
    values: Mapping[Node, Any]
    is_batched: bool
    leaves: bool

    @property
    def misreading(self) -> Misreading | None:
        """What a rehearsal showed, if the result was guessed wrong before."""
        return self.found.known.misread.get(self.node)

    @property
    def is_stuck(self) -> bool:
        """Whether the dimension that was to narrow here cannot."""
        return self.node in self.found.known.stuck

    # ---- the result -------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.meta)

    def output(self, axes: Sequence[TracedAxis], meta: Any = None) -> Traced:
        """The result, or one of them; its shape is read from the graph."""
        shape = shape_of(self.meta if meta is None else meta)
        return Traced(shape, tuple(a if n > 1 else None for a, n in zip(axes, shape, strict=True)))

    def outputs(self, axes: Sequence[TracedAxis]) -> Any:
        """The result of an operation that may return several tensors of one shape."""
        if isinstance(self.meta, torch.Tensor):
            return self.output(axes)
        return [self.output(axes, meta) for meta in self.meta]

    def keep_whole(self, given: Any, reason: str) -> Any:
        """The result, none of whose axes narrows, of arguments that are fixed."""
        self.fix(list(vars(given).values()), reason)
        return as_constant(self.meta)

    def guess(self) -> None:
        """Let a rehearsal check the result."""
        self.found.guesses[self.node] = None

    @property
    def failures(self) -> int:
        """How often a narrow network failed here, if no rehearsal has shown the result since."""
        return self.found.known.failed.get(self.node, 0) if self.misreading is None else 0

    def next_guess(self, guesses: Sequence[Guessed]) -> Guessed | None:
        """The first guess; after each failure the next one, and None after the last."""
        if self.failures >= len(guesses):
            return None
        if self.failures:
            self.found.reread.add(self.node)
        return guesses[self.failures]

    def source(self, place: int) -> SizeSource | None:
        """The attribute that a size of the operation comes from, if the run shows it."""
        found = self.found.known.sources.of(self.node)
        return found[place] if place < len(found) else None

    def follow_source(self, place: int, axis: TracedAxis) -> bool:
        """Let the attribute that a size comes from follow an axis, if the run shows one."""
        source = self.source(place)
        if source is not None:
            self.follow(source, axis)
        return source is not None

    @property
    def gives_shape(self) -> bool:
        """Whether only the shape of the result is read, to make another tensor of it."""
        schemas = [getattr(user.target, "_schema", None) for user in self.node.users]
        names = [schema.name.removeprefix("aten::") if schema else "" for schema in schemas]
        return bool(names) and all(name.endswith("_like") for name in names)

    def sized_by(self, size: int) -> list[str]:
        """The attributes of the module that are numbers of this size."""
        return [name for name, number in held_numbers(self.module).items() if number == size]

    def sized_by_child(self, size: int) -> list[str]:
        """The attributes of modules inside the module, as `child.name`, of this size.

        Not those of torch's own layers, which always have the sizes of their weights.
        """
        return [
            f"{child}.{name}"
            for child, module in self.module.named_children()
            if not type(module).__module__.startswith("torch.nn.")
            for name, value in vars(module).items()
            if type(value) is int and value == size and not name.startswith("_")
        ]

    # ---- what shrinks with what -------------------------------------------------------------

    def closed(self, value: Traced, dims: Iterable[int], why: str) -> list[TracedAxis]:
        """The axes of a tensor; dimensions that the operation mixes up are fixed."""
        axes = list(value.axes)
        for dim in dims:
            self.solver.fix(axes[dim], f"{why} by {self.place}")
            axes[dim] = None
        return axes

    def broadcast(self, values: Sequence[Any], shape: Sequence[int]) -> list[TracedAxis]:
        """The axes of an elementwise result: axes that meet must shrink together."""
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
            if met:
                axes[-position] = met[0]
        return axes

    def in_units(self, axis: TracedAxis, count: int, size: int) -> Pieces:
        """An axis of `count` entries, each of which is `size` neighbouring entries of `axis`."""
        found = self.solver.new(count)
        self.unify(axis, scaled(found, size))
        return found

    def equal_parts(self, axis: Pieces, count: int) -> Sequence[TracedAxis]:
        """`count` equal parts of an axis that a layer will cut again at every width."""
        try:
            parts = self.solver.cut(axis, [self.solver.size(axis) // count] * count)
        except Unsplittable:
            pieces = self.solver.pieces(axis)
            if len(pieces) == 1 and pieces[0][1] % count == 0:
                self.found.moving.append(self.place)
                return [((pieces[0][0], pieces[0][1] // count),)] * count
            self.solver.fix(axis, self.uneven)
            return [None] * count
        for part in parts[1:]:
            self.unify(parts[0], part)
        return parts

    # ---- what follows from it ---------------------------------------------------------------

    def make(self, layer: str, axis: TracedAxis, weight: Traced, can_fold: bool) -> None:
        """Report the call of a convolution or linear layer."""
        can_fold = can_fold and weight.name is not None and layer == self.layer
        self.found.makers.append(Maker(layer, axis, self.node, can_fold))
        self.learn(weight, axis)

    def learn(self, weight: Traced, axis: TracedAxis) -> None:
        """Report an axis that a weight makes, unless the weight is a constant."""
        if not self.found.is_constant(weight):
            self.found.made.append(axis)

    def attribute(self, name: str, axis: TracedAxis, place: int | None = None) -> None:
        """Let an attribute of the present module follow an axis, if the module has it."""
        held = vars(self.module).get(name)
        if axis is not None and held is not None:
            place = None if isinstance(held, int) else place
            self.bind(Follower(self.layer, name, axis, place))

    def count(self, value: Traced, inner: Sequence[tuple[int, TracedAxis]], times: int = 1) -> None:
        """Count the multiply-adds of a product: its result times the axes that are summed over."""
        factor, elastic = times, []
        for size, axis in [*zip(value.shape, value.axes, strict=True), *inner]:
            if axis is None:
                factor *= size
            else:
                elastic.append(axis)
        self.found.products.append(Product(self.layer, factor, tuple(elastic), self.is_batched))
