"""One pass over a graph, with one rule per node."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch.fx import GraphModule, Node

from anywidth.planning.trace.cursor import Cursor, Reporter
from anywidth.planning.trace.fixed_tables import meets_channels
from anywidth.planning.trace.nodes import (
    CASTS,
    are_met_by_entry,
    gives_indices,
    is_in_place,
    layer_of,
    leaving_nodes,
    op_name,
    passed_through,
    region_of,
    shapes_of,
    summed_factors,
    written_numbers,
)
from anywidth.planning.trace.rules.table import (
    ELEMENTWISE,
    FILLED,
    LOOKUPS,
    MAKERS,
    PRODUCTS,
    RULES,
    VIEWS,
)
from anywidth.planning.trace.trace_findings import Findings
from anywidth.planning.trace.value import Traced, as_constant
from anywidth.planning.trace.width_constants import look_for_constant

# Why the outputs of a network stay whole.
OUTPUT = "is an output of the model"


def run_rules(found: Findings, exported: Any, held: dict[str, str]) -> None:
    """Run the rules over a graph; `held` names the inputs that are parameters or buffers."""
    walk = Walk(found, leaving_nodes(exported.graph_module))
    inputs = exported.graph.find_nodes(op="placeholder")
    for node in inputs:
        if node.name in held:
            walk.values[node] = found.tensors[held[node.name]]
            continue
        value, numbers = as_constant(node.meta.get("val")), written_numbers(node)
        walk.values[node] = replace(value, numbers=numbers) if numbers else value
        walk.batched.add(node)
    outputs = walk.run(exported.graph_module)
    for node in inputs:
        if node.name in held and meets_channels(node, walk.batched):
            found.joining.add(held[node.name])
        uses = {op_name(user.target) for user in node.users}
        if uses - MAKERS.keys() and uses & MAKERS.keys():
            # Averaging would scale a tied embedding too.
            found.inputs.pop(held.get(node.name, ""), None)
    Reporter(found, "output", "").fix(outputs, OUTPUT)


class Walk:
    """The values of the nodes that were visited so far."""

    def __init__(self, found: Findings, leaving: set[Node]) -> None:
        self.found = found
        self.leaving = leaving
        self.values: dict[Node, Any] = {}
        # Those that depend on the network's input, not on parameters alone.
        self.batched: set[Node] = set()

    def run(self, module: GraphModule) -> Any:
        """Visit all nodes of a graph whose inputs are known, and return its outputs."""
        for node in module.graph.nodes:
            if node.op == "call_function":
                self.values[node] = self._call(node)
                if node in self.found.guesses:
                    self.found.guesses[node] = self.values[node]
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

    def _call(self, node: Node) -> Any:
        is_batched = any(n in self.batched for n in node.all_input_nodes)
        if is_batched or self._makes_batch(node):
            self.batched.add(node)
        region = region_of(node)
        if region is not None:
            return self._enter(*region)
        arguments = [self._lookup(x) for x in node.args]
        keywords = {name: self._lookup(x) for name, x in node.kwargs.items()}
        if node.target is operator.getitem:
            return arguments[0][arguments[1]]
        op, meta = op_name(node.target), node.meta.get("val")
        if not node.users and not is_in_place(node):
            return as_constant(meta)  # code that only reads its size
        leaves = (node in self.leaving and not self._compares(node)) or gives_indices(node)
        cursor = Cursor(self.found, op, layer_of(node), meta, node, self.values, is_batched, leaves)
        if op not in RULES or not hasattr(node.target, "_schema"):
            return _without_rule(cursor, [*arguments, *keywords.values()])
        names = node.target._schema.arguments
        bound = {a.name: a.default_value for a in names if a.has_default_value()}
        bound |= {a.name: value for a, value in zip(names, arguments, strict=False)}
        result = RULES[op](cursor, SimpleNamespace(**(bound | keywords)))
        first = arguments[0] if arguments else None
        if isinstance(first, Traced) and isinstance(result, Traced):
            if op in VIEWS or (op in LOOKUPS and self.found.is_parameter(first)):
                result = replace(result, source=first.source)
            if op in CASTS:
                result = replace(result, numbers=first.numbers)
        self.values[node] = result
        look_for_constant(cursor)
        return result

    def _compares(self, node: Node) -> bool:
        """Whether an operation sums over an axis of two tensors, which may be any channels."""
        if op_name(node.target) in PRODUCTS:
            return not self._sums_one(node)
        product = node.all_input_nodes[0] if op_name(node.target) == "sum" else node
        factors = product.all_input_nodes if op_name(product.target) == "mul" else []
        is_of_two = len(factors) == 2 and all(factor in self.batched for factor in factors)
        return is_of_two and not self._are_of_one(factors)

    def _sums_one(self, node: Node) -> bool:
        """Whether a product sums up one tensor: times ones, or p times log p."""
        factors = summed_factors(node)
        if len(factors) == 1 or any(map(_is_filled, factors)):
            return True
        is_batched = all(factor in self.batched for factor in factors)
        is_by_entry = len(factors) == 2 and is_batched and are_met_by_entry(node, factors)
        return is_by_entry and self._are_of_one(factors)

    def _are_of_one(self, factors: Sequence[Node]) -> bool:
        """Whether two factors come from one tensor; of p and log p, what is summed are classes."""
        first, second = (self._elementwise_sources(factor) for factor in factors)
        return not first.isdisjoint(second)

    def _elementwise_sources(self, node: Node) -> set[Node]:
        """A tensor and those that it comes from, with all of their channels, entry by entry."""
        found, left = set[Node](), [node]
        while left:
            passed = left.pop()
            if passed in found or passed.op != "call_function":
                continue
            found.add(passed)
            if op_name(passed.target) in ELEMENTWISE or op_name(passed.target) in VIEWS:
                left += [n for n in passed.all_input_nodes if n in self.batched]
        return found

    def _makes_batch(self, node: Node) -> bool:
        """Whether an operation makes something per example: first states, learned queries."""
        shapes = shapes_of(node.meta.get("val"))
        read = [shape for n in node.all_input_nodes for shape in shapes_of(n.meta.get("val"))]
        batch = self.found.known.batch
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


def _is_filled(node: Node) -> bool:
    """Whether all entries of a tensor are one number."""
    return op_name(passed_through(node, (*CASTS, *VIEWS)).target) in FILLED


def _without_rule(cursor: Cursor, given: Sequence[Any]) -> Any:
    """Fix all axes that an unknown operation touches; note it if its cost is unknown."""
    cursor.fix(given, f"no rule for the operation {cursor.op}")
    values = [v for item in given for v in (item if isinstance(item, list) else [item])]
    weights = [v for v in values if cursor.found.is_parameter(v) and len(v.shape) > 1]
    if weights and cursor.op not in cursor.found.uncounted:
        cursor.found.uncounted.append(cursor.op)
    return as_constant(cursor.meta)
