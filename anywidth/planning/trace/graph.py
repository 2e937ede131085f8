"""From a network to its plan: export the graph, run the rules over it, rehearse what they guess."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import is_converted
from anywidth.planning.groups import Plan
from anywidth.planning.parts import Example
from anywidth.planning.trace.build import Guesses, build_plan
from anywidth.planning.trace.exported_graphs import (
    export_graphs,
    export_in_mode,
    held_tensors,
    unused,
    updated_buffers,
)
from anywidth.planning.trace.joins import joined_in_training, prologues
from anywidth.planning.trace.nodes import nodes_of
from anywidth.planning.trace.rehearsal import misread, narrowed_copy, rehearsal_config
from anywidth.planning.trace.solver import TracedAxis
from anywidth.planning.trace.value import Context, Misreading, Traced, shape_of
from anywidth.planning.trace.walk import run_rules
from anywidth.width import ChannelConfig


def plan(model: nn.Module, example_input: Any) -> Plan:
    """Finds which channels of a network must shrink together.

    The network is exported and its graph read; nothing in it changes. A network may say more
    about itself with a method `width_hints(plan)`, called last with the finished plan to edit.

    Args:
        model: any network that `torch.export` takes.
        example_input: a tensor, or a tuple of the network's positional arguments, with a batch
            of at least 2. Multiply-adds are counted for one example of this shape, where the first
            dimension of the first tensor is the batch.

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
    graphs = export_graphs(model, inputs)
    context, found, _ = _trace(model, inputs, graphs)
    if context.activations:
        joined, chains = joined_in_training(model, inputs)
        first = next(iter(graphs.values()))
        found.activations = [pair for pair in context.activations if pair in joined]
        found.prologues = [
            chain for chain in prologues(first) if chain in chains and chain[:2] in joined
        ]
    found.example = [_described(x) for x in inputs]
    found.notes += [f"not counted: {op}" for op in context.uncounted]
    if context.moving:
        places = ", ".join(dict.fromkeys(context.moving))
        found.notes.append(f"{places}: later parts are other channels at other widths")
    for name in _shared_in_training(model, inputs, found, graphs):
        note = f"all widths update the one {name} in training, and calibrate() leaves it as it is"
        found.notes.append(note)
        _keep_written(found, name)
    hints = getattr(model, "width_hints", None)
    if hints is not None:
        hints(found)
    return found


def misread_groups(
    model: nn.Module, narrow: nn.Module, config: ChannelConfig, inputs: tuple[Any, ...]
) -> dict[str, str]:
    """Groups that a narrower network reshapes otherwise than tracing the whole one foretells.

    Args:
        model: the network as it was planned.
        narrow: the same network at `config`.
        inputs: the positional arguments of both.

    Returns, for each group, what is wrong with it.
    """
    try:
        graphs = export_graphs(model, inputs)
        parts = {training: export_in_mode(narrow, inputs, training) for training in graphs}
    except Exception:
        return {}  # what cannot be exported cannot be compared
    _, found, guesses = _trace(model, inputs, graphs)
    if tuple(found.groups) != tuple(config):
        return {}  # the plan in use was made by other means
    return {
        segment.group: f"{node.name} reshapes it in another way than the graph shows"
        for training, whole in graphs.items()
        for node in misread(found, config, guesses, whole, parts[training])
        for _, axes in guesses[node]
        for axis in axes
        for segment in axis or ()
    }


def _trace(
    model: nn.Module, inputs: tuple[Any, ...], graphs: dict[bool, Any]
) -> tuple[Context, Plan, Guesses]:
    """Runs the rules, and again with what a rehearsal shows as long as that is news."""
    known: dict[Node, Misreading] = {}
    positions: frozenset[tuple[str, int]] = frozenset()
    while True:
        context = Context(model, _batch_size(inputs), misread=known, positions=positions)
        tensors = _run_all_rules(context, graphs)
        if more := _positions(context, tensors):
            positions |= more
            continue
        found, guesses = build_plan(context, tensors)
        if not guesses:
            found.rehearsed = True
            return context, found, guesses
        config = rehearsal_config(found)
        wrong: dict[Node, int | None] = {}
        for training, graph in graphs.items():
            if guesses.keys().isdisjoint(nodes_of(graph.graph_module)):
                continue
            try:
                narrow = export_in_mode(narrowed_copy(model, found, config), inputs, training)
            except Exception:
                return context, found, guesses  # verification will find out why
            wrong |= misread(found, config, guesses, graph, narrow)
        if not wrong:
            found.rehearsed = True
            return context, found, guesses
        for node, dim in wrong.items():
            times = known[node].times if node in known else 0
            known[node] = Misreading(dim, times + 1)


def _run_all_rules(context: Context, graphs: dict[bool, Any]) -> dict[str, Traced]:
    model = context.model
    context.buffers = frozenset(name for name, _ in model.named_buffers())
    tensors = _fresh_tensors(context, graphs)
    _tie_attention(context, tensors)
    reports = ("costs", "uncounted", "folds", "activations")
    for number, exported in enumerate(graphs.values()):
        before = {name: list(getattr(context, name)) for name in reports}
        run_rules(context, exported, held_tensors(model, exported), tensors)
        if number > 0:  # of training, only which channels go together is of interest
            vars(context).update(before)
    _keep_constants(context, tensors)
    return tensors


def _shared_in_training(
    model: nn.Module, inputs: tuple[Any, ...], found: Plan, graphs: dict[bool, Any]
) -> list[str]:
    """Buffers that narrow and that training updates: the statistics of a norm of one's own."""
    own = {name for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    narrow = [name for name in own if any(axis is not None for axis in found.tensors.get(name, ()))]
    norms = {path for path, module in model.named_modules() if isinstance(module, _NormBase)}
    if all(name.rpartition(".")[0] in norms for name in narrow):
        return []
    try:
        training = graphs[True] if True in graphs else export_in_mode(model, inputs, True)
    except Exception:
        return []  # what cannot be exported cannot be looked at
    return sorted(updated_buffers(model, training).intersection(narrow))


def _keep_written(found: Plan, name: str) -> None:
    """Fixes what follows several stretches of a buffer that training writes into.

    Its active part is a copy then, and what is written there would be lost.
    """
    for axis in found.tensors[name]:
        for segment in axis if axis is not None and len(axis) > 1 else ():
            if found.can_narrow(segment.group):
                found.pin(segment.group, f"joined with others in {name}, where training writes")


def _described(argument: Any) -> Example:
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), str(argument.dtype).removeprefix("torch.")
    if argument is None or isinstance(argument, bool | int | float | str):
        return {"value": argument}
    return {"type": type(argument).__name__}


def _batch_size(inputs: tuple[Any, ...]) -> int:
    leaves = tree_leaves(inputs)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.dim() > 0]
    return int(tensors[0].shape[0]) if tensors else 1


def _fresh_tensors(context: Context, graphs: dict[bool, Any]) -> dict[str, Traced]:
    """Parameters and buffers by name, every axis of them free as yet."""
    idle = set.intersection(*(unused(context.model, exported) for exported in graphs.values()))
    tensors: dict[str, Traced] = {}
    for exported in graphs.values():
        held = held_tensors(context.model, exported)
        for node in exported.graph.nodes:
            name = held.get(node.name)
            if name is None or name in tensors:
                continue
            shape = shape_of(node.meta["val"])
            axes = tuple(
                context.solver.new(n) if n > 1 and (name, i) not in context.positions else None
                for i, n in enumerate(shape)
            )
            tensors[name] = Traced(shape, axes, scale_name=name)
            if name in idle:
                context.fix_all([tensors[name]], "takes no part in the traced forward")
    return tensors


def _keep_constants(context: Context, tensors: dict[str, Traced]) -> None:
    """Fixes the axes of buffers that no weight makes: filter banks, anchors, code books.

    Those that follow a layer's channels, like running statistics, are made by that layer.
    """
    solver = context.solver
    made = {variable for axis in context.made for variable, _ in solver.expand(axis or ())}
    for name in context.buffers & tensors.keys():
        for axis in tensors[name].axes:
            for piece in solver.expand(axis or ()):
                if piece[0] not in made:
                    solver.fix((piece,), f"an axis of the constant {name}")


def _positions(context: Context, tensors: dict[str, Traced]) -> set[tuple[str, int]]:
    """Axes of parameters that no layer makes or reads: of learned tokens, how many there are."""
    solver = context.solver

    def variables(axes: Iterable[TracedAxis]) -> set[int]:
        return {variable for axis in axes for variable, _ in solver.expand(axis or ())}

    read = [axis for _, axis in context.readers]
    channels = variables([*context.made, *context.summed, *read])
    merged = variables(context.merged)
    found = set()
    for name in tensors.keys() - context.buffers:
        for i, axis in enumerate(tensors[name].axes):
            own = variables([axis])
            is_open = any(solver.fixed(v) is None or v in merged for v in own)
            if is_open and own.isdisjoint(channels):
                found.add((name, i))
    return found


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
            "in_proj_bias": (width * 3,),
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
        context.bind(path, "num_heads", heads)
        for name in same:
            context.bind(path, name, width)
