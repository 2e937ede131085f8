"""Reading the nodes of an exported graph."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from anywidth.planning.trace.rules.products import spelled_out
from anywidth.planning.trace.rules.table import PRODUCTS, RULES
from anywidth.planning.trace.value import shape_of

# `torch.autocast` and `torch.no_grad` in a forward: the code inside becomes a separate graph.
REGIONS = ("wrap_with_autocast", "wrap_with_set_grad_enabled")

# Operations that return the entries of the tensor they take.
CASTS = ("to", "_to_copy", "type_as", "clone", "detach", "alias", "lift_fresh_copy", "contiguous")
# Operations whose numbers say how much, not along which dimension or how large.
COMPUTED_WITH = ("mul", "div", "add", "sub", "rsub", "pow", "lerp", "addcmul", "addcdiv",
                 "true_divide", "multiply", "subtract", "divide", "clamp", "clamp_min", "clamp_max",
                 "maximum", "minimum")  # fmt: skip
# Under this key, the input of a graph for a tensor in the code has that tensor.
WRITTEN = "written_tensor"


def op_name(target: Any) -> str:
    """The name of an operation; the in-place variant has the same name."""
    if not hasattr(target, "_schema"):
        return getattr(target, "__name__", str(target))
    name: str = target._schema.name.removeprefix("aten::")
    return name if name in RULES or not name.endswith("_") else name.rstrip("_")


def is_in_place(node: Node) -> bool:
    """Whether an operation changes one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def layer_of(node: Node) -> str:
    """The path of the innermost module that called an operation."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(stack.values())), "") if stack else ""


def region_of(node: Node) -> tuple[GraphModule, Sequence[Any]] | None:
    """The graph inside a region and its arguments; None if the node is not a region."""
    if node.op != "call_function" or op_name(node.target) not in REGIONS:
        return None
    for place, argument in enumerate(node.args):
        if isinstance(argument, Node) and argument.op == "get_attr":
            inner = getattr(node.graph.owning_module, str(argument.target))
            assert isinstance(inner, GraphModule)
            return inner, node.args[place + 1 :]
    return None


def nodes_of(module: GraphModule) -> Iterator[Node]:
    """All nodes in the order they run, including those inside regions."""
    for node in module.graph.nodes:
        yield node
        region = region_of(node)
        if region is not None:
            yield from nodes_of(region[0])


def leaving_nodes(module: GraphModule) -> set[Node]:
    """Nodes whose values reach an output of the graph without a product in between."""
    found: set[Node] = set()
    left = list(module.graph.output_node().all_input_nodes)
    while left:
        node = left.pop()
        if node in found:
            continue
        found.add(node)
        region = region_of(node)
        if region is not None:
            inner, arguments = region
            inside = leaving_nodes(inner)
            found |= inside
            inputs = inner.graph.find_nodes(op="placeholder")
            left += [a for i, a in zip(inputs, arguments, strict=True) if i in inside]
        elif op_name(node.target) not in PRODUCTS or len(summed_factors(node)) == 1:
            left += node.all_input_nodes
    return found


def gives_indices(node: Node) -> bool:
    """Whether anything reads the indices that an operation returns with its values."""
    metas = node.meta.get("val")
    return isinstance(metas, list | tuple) and any(
        user.users and not metas[int(str(user.args[1]))].is_floating_point()
        for user in node.users
        if user.target is operator.getitem
    )


def summed_factors(node: Node) -> list[Node]:
    """The factors of a product whose entries are summed over an axis; empty if it is another."""
    name = op_name(node.target)
    if name == "einsum":
        given: Any = node.args[1]
    else:
        given = node.args[:2] if name in ("matmul", "bmm", "mm", "mv", "dot", "vdot") else ()
    return [factor for factor in given if isinstance(factor, Node)]


def are_met_by_entry(node: Node, factors: Sequence[Node]) -> bool:
    """Whether each entry of two factors meets one of the other, not all along some axis."""
    first, second = (shape_of(factor.meta["val"]) for factor in factors)
    if op_name(node.target) != "einsum":
        return set(first[-2:-1]) <= {1} and set(second[-1:] if len(second) > 1 else ()) <= {1}
    (one, other), _ = spelled_out(str(node.args[0]), [len(first), len(second)])
    alone = {letter for letter, size in zip(one, first, strict=True) if size > 1} ^ {
        letter for letter, size in zip(other, second, strict=True) if size > 1
    }
    return not alone


def number_of(node: Node) -> float | None:
    """The number by which an operation scales its result; None if there is none."""
    name = op_name(node.target)
    if name in ("mul", "div") and len(node.args) > 1:
        number = node.args[1]
        if isinstance(number, Node):
            held = [_written(factor) for factor in node.all_input_nodes[name == "div" :]]
            number = next((n for n in held if n is not None), None)
    elif name == "scaled_dot_product_attention":
        number = node.kwargs.get("scale")
    else:
        number = node.kwargs.get("alpha") if name in ("addmm", "baddbmm") else None
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return float(number) if is_number else None  # type: ignore[arg-type]


def _written(node: Node) -> float | None:
    """The number that a tensor in the code holds, such as `torch.tensor(8.0)`."""
    held = passed_through(node, CASTS).meta.get(WRITTEN)
    if not isinstance(held, torch.Tensor) or held.numel() != 1 or held.is_meta:
        return None
    return float(held) if held.is_floating_point() else None


def written_numbers(node: Node, most: int = 16) -> tuple[int, ...]:
    """The entries of a short list of whole numbers that is in the code."""
    held = node.meta.get(WRITTEN)
    if not isinstance(held, torch.Tensor) or held.dim() != 1 or held.is_meta:
        return ()
    is_short = held.numel() <= most
    is_whole = not held.is_floating_point() and held.dtype is not torch.bool
    return tuple(map(int, held.tolist())) if is_short and is_whole else ()


def passed_through(node: Node, operations: Collection[str]) -> Node:
    """Where a tensor comes from, before operations that only pass it on."""
    while op_name(node.target) in operations and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def numbers_in(node: Node) -> list[float]:
    """All numbers that an operation is given for what it computes, entry by entry."""
    scale = number_of(node)
    if op_name(node.target) not in COMPUTED_WITH:
        return [] if scale is None else [scale]
    given = [*node.args, *node.kwargs.values()]
    written = [float(x) for x in given if type(x) in (int, float)]  # type: ignore[arg-type]
    return [*written, *([] if scale is None or scale in written else [scale])]


def shapes_of(meta: Any) -> list[tuple[int, ...]]:
    """The shape of each result of an operation."""
    metas = meta if isinstance(meta, list | tuple) else [meta]
    return [shape_of(m) for m in metas if isinstance(m, torch.Tensor)]
