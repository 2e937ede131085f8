"""Passing over a graph once, a rule a node."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from anywidth.planning.trace.joins import ACTIVATIONS
from anywidth.planning.trace.nodes import layer_of, op_name, region_of, shapes_of
from anywidth.planning.trace.rules.table import MAKERS, RULES
from anywidth.planning.trace.value import Context, Traced, shape_of


def run_rules(
    context: Context, exported: Any, held: dict[str, str], tensors: dict[str, Traced]
) -> None:
    """Runs the rules over a graph; `held` names its inputs that are among `tensors`."""
    walk = Walk(context)
    for node in exported.graph.find_nodes(op="placeholder"):
        name = held.get(node.name)
        walk.values[node] = as_constant(node.meta.get("val")) if name is None else tensors[name]
        if name is None:
            walk.batched.add(node)
    outputs = walk.run(exported.graph_module)
    for node in exported.graph.find_nodes(op="placeholder"):
        uses = {op_name(user.target) for user in node.users}
        if uses - MAKERS.keys() and uses & MAKERS.keys():
            # Averaging would scale a tied embedding too.
            context.inputs.pop(held.get(node.name, ""), None)
    context.fix_all(outputs, "is an output of the model")
    walk.report_joins()


class Walk:
    """What is known of the nodes passed so far."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.values: dict[Node, Any] = {}
        # Those that depend on the network's input, not on parameters alone.
        self.batched: set[Node] = set()
        self._made_by: dict[Node, str] = {}
        self._foldable: set[Node] = set()
        self._norms: list[str] = []
        self._folds: list[tuple[str, str]] = []
        self._activations: list[tuple[str, str]] = []

    def run(self, module: GraphModule) -> Any:
        """Passes over a graph whose inputs are known; returns its outputs."""
        for node in module.graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                return self._lookup(node.args[0])
            elif node.op != "placeholder":
                self.values[node] = as_constant(node.meta.get("val"))
        return []

    def _lookup(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return self.values[argument]
        if isinstance(argument, list | tuple):
            return [self._lookup(item) for item in argument]
        return argument

    def _call(self, node: Node) -> None:
        context = self.context
        is_batched = any(n in self.batched for n in node.all_input_nodes)
        if is_batched or self._makes_batch(node):
            self.batched.add(node)
        region = region_of(node)
        if region is not None:
            self.values[node] = self._enter(*region)
            return
        context.node, context.layer, context.op = node, layer_of(node), op_name(node.target)
        context.meta, context.is_batched = node.meta.get("val"), is_batched
        arguments = [self._lookup(x) for x in node.args]
        keywords = {name: self._lookup(x) for name, x in node.kwargs.items()}
        self.values[node] = _apply(context, node.target, arguments, keywords)
        if node in context.guesses:
            context.guesses[node] = self.values[node]
        if context.op in MAKERS:
            self._made_by[node] = context.makers[-1][0]
            # Nobody reads the layer's bias where its weight is used without the layer.
            if context.is_foldable and self._made_by[node] == context.layer:
                self._foldable.add(node)
        elif context.op == "batch_norm":
            self._note_norm(node)

    def _makes_batch(self, node: Node) -> bool:
        """Whether an operation makes something for each example: a first state, learned queries."""
        shapes = shapes_of(node.meta.get("val"))
        read = [shape for n in node.all_input_nodes for shape in shapes_of(n.meta.get("val"))]
        batch = self.context.batch
        if not read:
            return any(shape[:1] == (batch,) for shape in shapes)
        if op_name(node.target) not in ("expand", "repeat"):
            return False
        before = (1,) * (len(shapes[0]) - len(read[0])) + read[0]
        return any(old != new == batch for old, new in zip(before, shapes[0], strict=True))

    def _enter(self, inner: GraphModule, arguments: Sequence[Any]) -> Any:
        inputs = inner.graph.find_nodes(op="placeholder")
        for node, argument in zip(inputs, arguments, strict=True):
            self.values[node] = self._lookup(argument)
            if argument in self.batched:
                self.batched.add(node)
        return self.run(inner)

    def _note_norm(self, norm: Node) -> None:
        layer, read = self.context.layer, norm.args[0]
        assert isinstance(read, Node)
        self._norms.append(layer)
        if len(read.users) == 1 and read in self._foldable:
            self._folds.append((self._made_by.get(read, ""), layer))
        readers = list(norm.users)
        if len(readers) == 1 and op_name(readers[0].target) in ACTIVATIONS:
            self._activations.append((layer, layer_of(readers[0])))

    def report_joins(self) -> None:
        """Tells the context which norms could be merged with what comes before or after."""
        made, times = Counter(self._made_by.values()), Counter(self._norms)
        self.context.folds += [
            (a, b) for a, b in self._folds if a and b and made[a] == times[b] == 1
        ]
        self.context.activations += [
            (a, b) for a, b in self._activations if a and b and times[a] == 1
        ]


def as_constant(meta: Any) -> Any:
    if isinstance(meta, torch.Tensor):
        return Traced(shape_of(meta), (None,) * meta.dim())
    if isinstance(meta, list | tuple):
        return [as_constant(item) for item in meta]
    return meta


def _apply(context: Context, target: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    if target is operator.getitem:
        return arguments[0][arguments[1]]
    rule = RULES.get(context.op)
    if rule is None or not hasattr(target, "_schema"):
        given = [*arguments, *keywords.values()]
        context.fix_all(given, f"no rule for the operation {context.op}")
        if any(context.is_weight(value) for value in given) and context.op not in context.uncounted:
            context.uncounted.append(context.op)
        return as_constant(context.meta)
    names = target._schema.arguments
    bound = {a.name: a.default_value for a in names if a.has_default_value()}
    bound |= {a.name: value for a, value in zip(names, arguments, strict=False)}
    return rule(context, SimpleNamespace(**(bound | keywords)))
