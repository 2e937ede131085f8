"""From a network to its plan: export the graph, run the rules over it, rehearse what they guess."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import is_converted
from anywidth.planning.example_inputs import described
from anywidth.planning.groups import Plan
from anywidth.planning.trace.build import STAYING, Guesses, build_plan
from anywidth.planning.trace.exported_graphs import Exports, export_in_mode, held_tensors
from anywidth.planning.trace.fixed_tables import keep_tables
from anywidth.planning.trace.held_axes import add_tensors, keep_constants, positions, tie_attention
from anywidth.planning.trace.joins import activations_and_prologues, folds
from anywidth.planning.trace.nodes import nodes_of
from anywidth.planning.trace.rehearsal import misread, narrowed_copy, rehearsal_config
from anywidth.planning.trace.trace_findings import Findings, Known, Misreading
from anywidth.planning.trace.walk import run_rules
from anywidth.planning.trace.written_buffers import note_written_buffers
from anywidth.width import ChannelConfig

# More attributes of a size than any module has.
MOST_ATTRIBUTES = 1000


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
    exports = Exports(model, inputs)
    found, _ = _trace(exports)
    found.activations, found.prologues = activations_and_prologues(exports)
    found.example, found.given = [described(x) for x in inputs], inputs
    note_written_buffers(found, exports)
    for note in found.notes:
        if STAYING in note:
            warnings.warn(f"{type(model).__name__}: {note}", stacklevel=2)
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
    exports = Exports(model, inputs)
    try:
        parts = {training: export_in_mode(narrow, inputs, training) for training in exports.traced}
    except Exception:
        return {}  # what cannot be exported cannot be compared
    found, guesses = _trace(exports)
    if tuple(found.groups) != tuple(config):
        return {}  # the plan in use was made by other means
    return {
        segment.group: f"{node.name} reshapes it in another way than the graph shows"
        for training, whole in exports.traced.items()
        for node in misread(found, config, guesses, whole, parts[training])
        for _, axes in guesses[node].results
        for axis in axes
        for segment in axis or ()
    }


def _trace(exports: Exports) -> tuple[Plan, Guesses]:
    """Runs the rules, and again with what a rehearsal shows as long as that is news."""
    known = Known(exports.model, _batch_size(exports.inputs))
    while True:
        findings = _run_all_rules(known, exports)
        if lengths := positions(findings):
            known = replace(known, positions=known.positions | lengths)
            continue
        found, guesses = build_plan(findings)
        wrong = _rehearse(exports, found, guesses)
        if wrong is None and any(guess.number for guess in guesses.values()):
            # An attribute that a number may be of is used otherwise too, or nothing runs narrower.
            never = {n: Misreading(None, MOST_ATTRIBUTES) for n, g in guesses.items() if g.number}
            known = replace(known, misread={**known.misread, **never})
            continue
        if not wrong:
            found.rehearsed = wrong is not None
            return found, guesses
        times = {node: known.misread[node].times for node in wrong if node in known.misread}
        news = {node: Misreading(dim, times.get(node, 0) + 1) for node, dim in wrong.items()}
        known = replace(known, misread={**known.misread, **news})


def _rehearse(exports: Exports, found: Plan, guesses: Guesses) -> dict[Node, int | None] | None:
    """Operations that do other than guessed at another width; None if that cannot be seen."""
    wrong: dict[Node, int | None] = {}
    config = rehearsal_config(found)
    for training, graph in exports.traced.items():
        if guesses.keys().isdisjoint(nodes_of(graph.graph_module)):
            continue
        try:
            copy = narrowed_copy(exports.model, found, config)
            narrow = export_in_mode(copy, exports.inputs, training)
        except Exception:
            return None  # verification will find out why
        wrong |= misread(found, config, guesses, graph, narrow)
    return wrong


def _run_all_rules(known: Known, exports: Exports) -> Findings:
    found = Findings(known)
    add_tensors(found, exports)
    tie_attention(found)
    for exported in exports.traced.values():
        run_rules(found, exported, held_tensors(exports.model, exported))
        if exported is exports.first:
            found.folds = folds(found.makers, exported)
            counted = list(found.products), list(found.uncounted)
    # Of training, only which channels go together is of interest.
    found.products, found.uncounted = counted
    keep_constants(found)
    keep_tables(found, exports)
    return found


def _batch_size(inputs: tuple[Any, ...]) -> int:
    leaves = tree_leaves(inputs)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.dim() > 0]
    return int(tensors[0].shape[0]) if tensors else 1
