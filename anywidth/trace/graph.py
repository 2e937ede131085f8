"""From a network to its plan: export the graph, run the rules over it, name the groups."""

from __future__ import annotations

import contextlib
import math
import operator
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind

from anywidth.errors import AnywidthError
from anywidth.groups import AttributeSlot, Axis, ChannelGroup, CostTerm, Plan, Segment
from anywidth.layers import attribute_slots
from anywidth.trace.rules import MAKERS, RULES
from anywidth.trace.solver import Pieces, TracedAxis
from anywidth.trace.value import Context, Traced, shape_of


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
    inputs = example_input if isinstance(example_input, tuple) else (example_input,)
    exported = _export(model, inputs)
    context = Context(model)
    tensors = _fresh_tensors(context, exported)
    _tie_attention(context, tensors)
    _run_rules(context, exported, tensors)
    found = _build(context, tensors, _batch_size(inputs))
    found.example = [
        (tuple(x.shape), str(x.dtype).removeprefix("torch."))
        for x in inputs
        if isinstance(x, torch.Tensor)
    ]
    hints = getattr(model, "width_hints", None)
    if hints is not None:
        hints(found)
    return found


def _export(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """The graph in training mode, where auxiliary heads run too, or else in evaluation mode."""
    errors: list[str] = []
    modes = {module: module.training for module in model.modules()}
    try:
        for training in (True, False):
            model.train(training)
            try:
                with _readable_attention(), warnings.catch_warnings(), torch.no_grad():
                    warnings.simplefilter("ignore")
                    return torch.export.export(model, inputs, strict=False)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    finally:
        for module, mode in modes.items():
            module.training = mode
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs]
    raise AnywidthError(
        f"{type(model).__name__} could not be exported with the example input {shapes}: "
        f"{errors[-1]}. Check that model(*example_input) runs, with a batch of at least 2, and "
        "that forward() does not branch on the values of tensors"
    )


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


def _fresh_tensors(context: Context, exported: Any) -> dict[str, Traced]:
    """Parameters and buffers by name, every axis of them free as yet."""
    held = _held_tensors(exported)
    tensors: dict[str, Traced] = {}
    for node in exported.graph.nodes:
        if node.name in held:
            shape = shape_of(node.meta["val"])
            axes = tuple(context.solver.new(n) if n > 1 else None for n in shape)
            tensors[held[node.name]] = Traced(shape, axes, scale_name=held[node.name])
            if not node.users:
                context.fix_all([tensors[held[node.name]]], "takes no part in the traced forward")
    return tensors


def _held_tensors(exported: Any) -> dict[str, str]:
    """The `state_dict` name of each graph input that is a parameter or buffer."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    specs = exported.graph_signature.input_specs
    return {spec.arg.name: spec.target for spec in specs if spec.kind in kinds}


def _run_rules(context: Context, exported: Any, tensors: dict[str, Traced]) -> None:
    """Passes over the graph once, a rule a node."""
    held = _held_tensors(exported)
    values: dict[str, Any] = {}
    made_by: dict[str, str] = {}

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
        elif node.op == "call_function":
            context.layer = _layer(node)
            context.op = _op_name(node.target)
            context.meta = meta
            arguments = [lookup(x) for x in node.args]
            keywords = {name: lookup(x) for name, x in node.kwargs.items()}
            values[node.name] = _apply(context, node.target, arguments, keywords)
            if context.op in MAKERS:
                made_by[node.name] = context.makers[-1][0]
            elif context.op == "batch_norm" and len(node.args[0].users) == 1:
                context.folds.append((made_by.get(node.args[0].name, ""), context.layer))
        elif node.op == "output":
            context.fix_all(lookup(list(node.args)), "is an output of the model")
        else:
            values[node.name] = _constant(meta)


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
        context.attributes.append((path, "num_heads", heads))
        context.attributes += [(path, name, width) for name in same]


# ---- the plan ----------------------------------------------------------------------------------


def _build(context: Context, tensors: dict[str, Traced], batch: int) -> Plan:
    solver = context.solver
    names, units = _name_groups(context, tensors)
    makers = _layers_by_variable(context, context.makers)
    readers = _layers_by_variable(context, context.readers)
    groups = {}
    for variable, name in names.items():
        count, unit = solver.units(variable), units[variable]
        fixed = solver.fixed(variable)
        if fixed is None and count == 1:
            fixed = f"is one unit of {unit} channels"
        if fixed is None or variable in makers:
            groups[name] = ChannelGroup(
                name,
                channels=count * unit,
                unit=unit,
                fixed=fixed,
                makers=tuple(makers.get(variable, ())),
                readers=tuple(readers.get(variable, ())),
            )

    def axis_of(axis: TracedAxis) -> Axis:
        """None where nothing of the axis can ever narrow."""
        pieces = solver.expand(axis or ())
        elastic = any(solver.fixed(variable) is None for variable, _ in pieces)
        return tuple(Segment(group_for(v), m) for v, m in pieces) if elastic else None

    def group_for(variable: int) -> str:
        name = names[variable]
        if name not in groups:
            size = solver.units(variable) * units[variable]
            groups[name] = ChannelGroup(name, size, units[variable], fixed=solver.fixed(variable))
        return name

    def cost_of(layer: str, factor: int, axes: Sequence[Pieces]) -> CostTerm:
        kept = [(axis, axis_of(axis)) for axis in axes]
        whole = math.prod(solver.size(solver.expand(a)) for a, segments in kept if segments is None)
        return CostTerm(layer, factor * whole // batch, tuple(s for _, s in kept if s is not None))

    axes = {name: tuple(axis_of(a) for a in value.axes) for name, value in tensors.items()}
    bound = [
        AttributeSlot(path, name, segments)
        for path, name, axis in dict.fromkeys(context.attributes)
        if (segments := axis_of(axis)) is not None
    ]
    return Plan(
        groups=groups,
        tensors=axes,
        shapes={name: value.shape for name, value in tensors.items()},
        parameters=tuple(name for name, _ in context.model.named_parameters() if name in tensors),
        attributes=bound + attribute_slots(context.model, axes),
        costs=[cost_of(*term) for term in context.costs],
        inputs=dict(context.inputs),
        outputs={layer: axis_of(axis) for layer, axis in context.makers},
        folds=_once(context.folds),
    )


def _layers_by_variable(
    context: Context, listed: Sequence[tuple[str, TracedAxis]]
) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for layer, axis in listed:
        for variable, _ in context.solver.expand(axis or ()):
            if layer not in found.setdefault(variable, []):
                found[variable].append(layer)
    return found


def _once(folds: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs whose layer and norm are each called exactly once."""
    layers, norms = Counter(a for a, _ in folds), Counter(b for _, b in folds)
    return [(a, b) for a, b in folds if a and b and layers[a] == norms[b] == 1]


def _name_groups(
    context: Context, tensors: dict[str, Traced]
) -> tuple[dict[int, str], dict[int, int]]:
    """A name for every variable that is left, and the channels in one unit of it.

    A group is called after the layer that makes it first. Its unit is the number of channels
    that one unit is in the output of a layer, so that its size is the one a reader expects.
    """
    solver = context.solver
    units: dict[int, int] = {}
    for _, axis in context.makers:
        for variable, m in solver.expand(axis or ()):
            units[variable] = max(units.get(variable, 0), m)
    made = set(units)
    for value in tensors.values():
        for axis in value.axes:
            for variable, m in solver.expand(axis or ()):
                if variable not in made:
                    units[variable] = math.gcd(units.get(variable, 0), m)
    names: dict[int, str] = {}
    taken: set[str] = set()

    def give(axis: TracedAxis, base: str) -> None:
        variables = list(dict.fromkeys(variable for variable, _ in solver.expand(axis or ())))
        fresh = [v for v in variables if v not in names and v in units]
        for variable in fresh:
            name = base if len(fresh) == 1 else f"{base}[{variables.index(variable)}]"
            while name in taken:
                name += "'"
            taken.add(name)
            names[variable] = name

    for layer, axis in context.makers:
        give(axis, layer or "output")
    for name, value in tensors.items():
        for i, axis in enumerate(value.axes):
            give(axis, f"{name}:{i}")
    return names, units
