"""From a network to its plan: export the graph and run the rules over it."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind

from anywidth.errors import AnywidthError
from anywidth.groups import Plan
from anywidth.plan_parts import Example
from anywidth.state import is_converted
from anywidth.trace.build import build_plan
from anywidth.trace.rules import MAKERS, RULES
from anywidth.trace.value import Context, Traced, shape_of

ACTIVATIONS = ("relu", "relu6", "hardtanh", "silu", "hardswish")


def plan(model: nn.Module, example_input: Any) -> Plan:
    """Finds which channels of a network must shrink together.

    The network is exported and its graph read; nothing in it changes. A network may say more
    about itself with a method `width_hints(plan)`, called last with the finished plan to edit.

    Args:
        model: any network that `torch.export` takes.
        example_input: a tensor, or a tuple of the network's positional arguments, with a batch
            of at least 2. Multiply-adds are counted for one example of this shape.

    Example:
        >>> plan = anywidth.plan(torchvision.models.resnet50(), torch.randn(2, 3, 224, 224))
        >>> print(plan)
    """
    if not isinstance(model, nn.Module):
        raise AnywidthError(f"plan(model={type(model).__name__}): expected a torch.nn.Module")
    if is_converted(model):
        raise AnywidthError(
            f"{type(model).__name__} (or a part of it) has been converted already; "
            "its plan is anywidth.plan_of(model)"
        )
    inputs = example_input if isinstance(example_input, tuple) else (example_input,)
    graphs = _export(model, inputs)
    context = Context(model)
    tensors = _fresh_tensors(context, graphs)
    _tie_attention(context, tensors)
    for number, exported in enumerate(graphs):
        before = list(context.costs), list(context.folds), list(context.activations)
        _run_rules(context, exported, tensors)
        if number > 0:
            context.costs, context.folds, context.activations = before
    if context.activations:
        joined, prologues = _joined_in_training(model, inputs)
        context.activations = [pair for pair in context.activations if pair in joined]
        context.prologues = [
            chain for chain in _prologues(graphs[0]) if chain in prologues and chain[:2] in joined
        ]
    found = build_plan(context, tensors, _batch_size(inputs))
    found.example = [_described(x) for x in inputs]
    hints = getattr(model, "width_hints", None)
    if hints is not None:
        hints(found)
    return found


def _described(argument: Any) -> Example:
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), str(argument.dtype).removeprefix("torch.")
    if argument is None or isinstance(argument, bool | int | float | str):
        return {"value": argument}
    return {"type": type(argument).__name__}


def _export(model: nn.Module, inputs: tuple[Any, ...]) -> list[Any]:
    """The graph in evaluation mode, whose cost counts; then the one in training mode if needed.

    Needed it is where parameters wait for training (auxiliary heads), or evaluation cannot be
    exported.
    """
    graphs: list[Any] = []
    errors: list[str] = []
    for training in (False, True):
        try:
            graphs.append(_export_in_mode(model, inputs, training))
        except Exception as error:
            lines = str(error).strip().splitlines() or ["no message"]
            errors.append(f"{type(error).__name__}: {lines[0]}")
        if graphs and not _unused(model, graphs[0]):
            break
    if graphs:
        return graphs
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs]
    raise AnywidthError(
        f"{type(model).__name__} could not be exported with the example input {shapes}: "
        f"{errors[0]}. Check that model(*example_input) runs, with a batch of at least 2, and "
        "that forward() does not branch on the values of tensors"
    )


def _export_in_mode(model: nn.Module, inputs: tuple[Any, ...], training: bool) -> Any:
    modes = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        with _readable_attention(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(model, inputs, strict=False)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _joined_in_training(
    model: nn.Module, inputs: tuple[Any, ...]
) -> tuple[list[tuple[str, str]], list[tuple[str, str, str]]]:
    """(batch norm, what alone reads it) in training, where more may come between or read along.

    Second, those with the convolution that alone reads what the reader gives.
    """
    try:
        exported = _export_in_mode(model, inputs, training=True)
    except Exception:
        return [], []  # nothing is known, so nothing is joined
    pairs = [(_layer(norm), _layer(reader)) for norm, reader in _read_alone(exported)]
    return pairs, _prologues(exported)


def _read_alone(exported: Any) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """Batch norms that are called once, each with the one operation that reads its output."""
    norms = [node for node in exported.graph.nodes if _op_name(node.target) == "batch_norm"]
    times = Counter(_layer(norm) for norm in norms)
    return [
        (norm, next(iter(norm.users)))
        for norm in norms
        if times[_layer(norm)] == len(norm.users) == 1
    ]


def _prologues(exported: Any) -> list[tuple[str, str, str]]:
    """(batch norm, activation, convolution), each alone in reading what the one before gives."""
    convolutions = Counter(
        _layer(node) for node in exported.graph.nodes if _op_name(node.target) == "conv2d"
    )
    found = []
    for norm, activation in _read_alone(exported):
        readers = list(activation.users)
        if (
            _op_name(activation.target) in ACTIVATIONS
            and len(readers) == 1
            and _op_name(readers[0].target) == "conv2d"
            and readers[0].args[0] is activation
            and convolutions[_layer(readers[0])] == 1
        ):
            found.append((_layer(norm), _layer(activation), _layer(readers[0])))
    return found


def _unused(model: nn.Module, exported: Any) -> set[str]:
    """The names of parameters that take no part in a graph."""
    held = _held_tensors(model, exported)
    used = {held[node.name] for node in exported.graph.nodes if node.name in held and node.users}
    return {name for name, _ in model.named_parameters()} - used


@contextlib.contextmanager
def _readable_attention() -> Iterator[None]:
    """Attention exported as the operations it is made of, not as one fused operation."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _batch_size(inputs: tuple[Any, ...]) -> int:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.dim() > 0]
    return int(tensors[0].shape[0]) if tensors else 1


def _fresh_tensors(context: Context, graphs: list[Any]) -> dict[str, Traced]:
    """Parameters and buffers by name, every axis of them free as yet."""
    unused = set.intersection(*(_unused(context.model, exported) for exported in graphs))
    tensors: dict[str, Traced] = {}
    for exported in graphs:
        held = _held_tensors(context.model, exported)
        for node in exported.graph.nodes:
            name = held.get(node.name)
            if name is None or name in tensors:
                continue
            shape = shape_of(node.meta["val"])
            axes = tuple(context.solver.new(n) if n > 1 else None for n in shape)
            tensors[name] = Traced(shape, axes, scale_name=name)
            if name in unused:
                context.fix_all([tensors[name]], "takes no part in the traced forward")
    return tensors


def _held_tensors(model: nn.Module, exported: Any) -> dict[str, str]:
    """The `state_dict` name of each graph input that is a parameter or buffer.

    A tensor that several modules share goes by the first of its names.
    """
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            aliases[name] = names.setdefault(id(tensor), name)
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    specs = exported.graph_signature.input_specs
    return {spec.arg.name: aliases[spec.target] for spec in specs if spec.kind in kinds}


def _run_rules(context: Context, exported: Any, tensors: dict[str, Traced]) -> None:
    """Passes over the graph once, a rule a node."""
    held = _held_tensors(context.model, exported)
    values: dict[str, Any] = {}
    batched: set[str] = set()
    made_by: dict[str, str] = {}
    foldable: set[str] = set()
    folds: list[tuple[str, str]] = []
    activations: list[tuple[str, str]] = []
    norms: list[str] = []

    def lookup(argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return values[argument.name]
        if isinstance(argument, list | tuple):
            return [lookup(item) for item in argument]
        return argument

    for node in exported.graph.nodes:
        meta = node.meta.get("val")
        if node.op == "placeholder":
            name = held.get(node.name)
            values[node.name] = _constant(meta) if name is None else tensors[name]
            if name is None:
                batched.add(node.name)
        elif node.op == "call_function":
            context.layer = _layer(node)
            context.op = _op_name(node.target)
            context.meta = meta
            context.is_batched = any(n.name in batched for n in node.all_input_nodes)
            if context.is_batched:
                batched.add(node.name)
            arguments = [lookup(x) for x in node.args]
            keywords = {name: lookup(x) for name, x in node.kwargs.items()}
            values[node.name] = _apply(context, node.target, arguments, keywords)
            if context.op in MAKERS:
                made_by[node.name] = context.makers[-1][0]
                # Nobody reads the layer's bias where its weight is used without the layer.
                if context.is_foldable and made_by[node.name] == context.layer:
                    foldable.add(node.name)
            elif context.op == "batch_norm":
                norms.append(context.layer)
                if len(node.args[0].users) == 1 and node.args[0].name in foldable:
                    folds.append((made_by.get(node.args[0].name, ""), context.layer))
                readers = list(node.users)
                if len(readers) == 1 and _op_name(readers[0].target) in ACTIVATIONS:
                    activations.append((context.layer, _layer(readers[0])))
        elif node.op == "output":
            context.fix_all(lookup(list(node.args)), "is an output of the model")
        else:
            values[node.name] = _constant(meta)
    made = Counter(made_by.values())
    once = [(a, b) for a, b in folds if a and b and made[a] == norms.count(b) == 1]
    context.folds += once
    context.activations += [(a, b) for a, b in activations if a and b and norms.count(a) == 1]


def _constant(meta: Any) -> Any:
    if isinstance(meta, torch.Tensor):
        return Traced(shape_of(meta), (None,) * meta.dim())
    if isinstance(meta, list | tuple):
        return [_constant(item) for item in meta]
    return meta


def _apply(context: Context, target: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    if target is operator.getitem:
        return arguments[0][arguments[1]]
    rule = RULES.get(context.op)
    if rule is None or not hasattr(target, "_schema"):
        context.fix_all([*arguments, *keywords.values()], f"no rule for the operation {context.op}")
        return _constant(context.meta)
    names = target._schema.arguments
    bound = {a.name: a.default_value for a in names if a.has_default_value()}
    bound |= {a.name: value for a, value in zip(names, arguments, strict=False)}
    return rule(context, SimpleNamespace(**(bound | keywords)))


def _op_name(target: Any) -> str:
    """The name of an operation; one that works in place counts as the one that does not."""
    if not hasattr(target, "_schema"):
        return getattr(target, "__name__", str(target))
    name: str = target._schema.name.removeprefix("aten::")
    return name if name in RULES or not name.endswith("_") else name.rstrip("_")


def _layer(node: torch.fx.Node) -> str:
    """The path of the innermost module an operation was called in."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(stack.values())), "") if stack else ""


def _tie_attention(context: Context, tensors: dict[str, Traced]) -> None:
    """`nn.MultiheadAttention` has one width inside and out: its heads times their size."""
    for path, module in context.model.named_modules():
        prefix = f"{path}." if path else ""
        if (
            not isinstance(module, nn.MultiheadAttention)
            or f"{prefix}out_proj.weight" not in tensors
        ):
            continue
        context.op, context.layer = "MultiheadAttention", path
        heads = context.solver.new(module.num_heads)
        width = tuple((variable, module.head_dim) for variable, _ in heads)
        inside = {
            "out_proj.weight": (width, width),
            "in_proj_weight": (width * 3, width),
            "q_proj_weight": (width, width),
            "k_proj_weight": (width, None),
            "v_proj_weight": (width, None),
        }
        for name, axes in inside.items():
            if prefix + name in tensors:
                for own, axis in zip(tensors[prefix + name].axes, axes, strict=True):
                    if axis is not None:
                        context.unify(own, axis)
        same = ("embed_dim", "kdim", "vdim") if module._qkv_same_embed_dim else ("embed_dim",)
        context.attributes.append((path, "num_heads", heads, None))
        context.attributes += [(path, name, width, None) for name in same]
