"""From a network to its plan: export the graph, run the rules, check guesses by a rehearsal."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.fx import Node
from torch.nn.parameter import is_lazy

from anywidth.errors import AnywidthError
from anywidth.planning.call_arguments import positional_arguments
from anywidth.planning.cuts import is_converted
from anywidth.planning.example_inputs import described
from anywidth.planning.groups import Plan
from anywidth.planning.part_calls import check_parts, record_calls
from anywidth.planning.parts import CostTerm
from anywidth.planning.plain_tensors import tables_as_buffers
from anywidth.planning.trace.build import STAYING, Guesses, build_plan
from anywidth.planning.trace.cursor import MEETS_CONSTANT
from anywidth.planning.trace.export_errors import export_failure, known_cure
from anywidth.planning.trace.exported_graphs import Exports, export_in_mode, held_tensors
from anywidth.planning.trace.failed_lines import blamed_guesses, earlier_guesses
from anywidth.planning.trace.fixed_tables import keep_tables
from anywidth.planning.trace.found_parts import export_parts, find_parts
from anywidth.planning.trace.held_axes import (
    add_tensors,
    keep_constants,
    keep_filters,
    positions,
    tie_attention,
    tie_recurrent,
)
from anywidth.planning.trace.joins import folds, joins
from anywidth.planning.trace.nodes import nodes_of
from anywidth.planning.trace.rehearsal import (
    followed_numbers,
    misread,
    narrowed_copy,
    rehearsal_config,
    uneven_config,
)
from anywidth.planning.trace.size_sources import SizeSources
from anywidth.planning.trace.trace_findings import Findings, Known, Misreading
from anywidth.planning.trace.walk import OUTPUT, run_rules
from anywidth.planning.trace.written_buffers import note_written_buffers
from anywidth.width import ChannelConfig

# No operation has more guesses than this.
NO_MORE = 1000
# What the costs of the rest of a network go by, if parts of it were planned.
OUTSIDE = "outside the parts"
# After this many rehearsals, the rest is left to verification.
MOST_ROUNDS = 20


def plan(
    model: nn.Module,
    example_input: Any = None,
    *,
    parts: Sequence[str] | Literal["auto"] | None = None,
    **named: Any,
) -> Plan:
    """Find which channels of a network must shrink together.

    The network is exported and its graph is read; the network does not change. A network may have a
    method `width_hints(plan)`, which is called last and may edit the finished plan.

    Args:
        model: any network that `torch.export` takes.
        example_input: a tensor, a tuple of the network's positional arguments, or a dict of its
            arguments by name, with a batch of at least 2. Multiply-adds are counted for one example
            of this shape; the first dimension of the first tensor is the batch.
        parts: names of modules that alone may narrow, for a network that `torch.export` cannot take
            as a whole, such as a detector; `"auto"` finds them if need be. The network is run once
            with the example. What a part is given and returns stays whole, unless it goes from one
            part to another and nothing else reads it.
        named: further arguments of the network by name.

    Example:
        >>> plan = anywidth.plan(torchvision.models.resnet50(), torch.randn(2, 3, 224, 224))
        >>> print(plan)
        >>> plan = anywidth.plan(bert, input_ids=tokens, attention_mask=mask)
        >>> plan = anywidth.plan(retinanet, [image, image], parts=["backbone", "head"])
    """
    if not isinstance(model, nn.Module):
        raise AnywidthError(f"plan(model={type(model).__name__}): expected a torch.nn.Module")
    if is_converted(model):
        raise AnywidthError(
            f"{type(model).__name__} (or a part of it) has been converted already; "
            "its plan is anywidth.plan_of(model)"
        )
    if example_input is None and not named:
        raise AnywidthError("plan() was given no example input: pass plan(model, x)")
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise AnywidthError(
            f"{type(model).__name__} has parameters without a size, such as {lazy[0]}: run it "
            "once, model(*example_input), and plan it then"
        )
    inputs = positional_arguments(model, example_input, named)
    with tables_as_buffers(model):
        found = _planned(model, inputs, parts)
    found.example, found.given = [described(x) for x in inputs], inputs
    for note in found.notes:
        if STAYING in note:
            warnings.warn(f"{type(model).__name__}: {note}", stacklevel=2)
    hints = getattr(model, "width_hints", None)
    if hints is not None:
        hints(found)
    return found


def _planned(
    model: nn.Module, inputs: tuple[Any, ...], parts: Sequence[str] | Literal["auto"] | None
) -> Plan:
    exports = Exports(model, inputs)
    if parts == "auto":
        with contextlib.suppress(AnywidthError):
            _ = exports.traced
            parts = None  # it can be exported as a whole
    if parts is None:
        _check_exported(exports)
        found, _ = _trace(exports)
    else:
        exports, found = _trace_parts(model, inputs, parts)
    found.activations, found.prologues, found.sums = joins(exports)
    if names := exports.seen.hidden:
        found.notes.append(f"{', '.join(names)}, returned beside logits, may narrow")
    note_written_buffers(found, exports)
    return found


def _check_exported(exports: Exports) -> None:
    """Raises if the network cannot be exported, naming the parts of it that can be."""
    try:
        _ = exports.traced
    except AnywidthError as error:
        why = error.__cause__
        if why is None or known_cure(why) is not None:
            raise
        try:
            _, found = _trace_parts(exports.model, exports.inputs, "auto")
        except Exception:
            raise error from why  # it does not run, or none of its parts can be exported
        cure = f"Plan parts of it: anywidth.plan(model, example_input, parts={found.parts})"
        raise export_failure(exports.model, exports.inputs, why, cure) from why


def _trace_parts(
    model: nn.Module, inputs: tuple[Any, ...], parts: Sequence[str] | Literal["auto"]
) -> tuple[Exports, Plan]:
    """The graph of some parts of a network, and the plan in which these alone narrow."""
    if parts == "auto":
        names = find_parts(model, inputs)
        _check_found(model, names)
    else:
        names = check_parts(model, parts)
    calls = record_calls(model, inputs, names)
    exports = export_parts(model, calls, inputs)
    found, _ = _trace(exports)
    found.costs.append(CostTerm(OUTSIDE, calls.outside // exports.examples, ()))
    for name, group in found.groups.items():
        if group.fixed == OUTPUT:
            found.pin(name, "is read outside the parts")
    found.parts = list(names)
    if parts == "auto":
        found.parts = [part for part in names if calls.joins(part) or _narrows(found, part)]
        _check_found(model, found.parts)
    found.notes.append(f"only parts narrow: {', '.join(found.parts)}")
    if calls.idle and any(call.inner for call in calls.calls):
        idle = ", ".join(calls.idle[:3]) + (", ..." if len(calls.idle) > 3 else "")
        found.notes.append(
            f"did not run with the example, and fails at narrow widths if given what goes from "
            f"part to part: {idle}"
        )
    return exports, found


def _check_found(model: nn.Module, parts: Sequence[str]) -> None:
    if not parts:
        raise AnywidthError(
            f"parts='auto': no part of {type(model).__name__} can be exported and narrows"
        )


def _narrows(found: Plan, part: str) -> bool:
    """Whether any tensor of a part is elastic."""
    axes = (axes for name, axes in found.tensors.items() if name.startswith(f"{part}."))
    return any(axis is not None for one in axes for axis in one)


def misread_groups(
    model: nn.Module, narrow: nn.Module, config: ChannelConfig, inputs: tuple[Any, ...]
) -> dict[str, str]:
    """Groups whose shapes in a narrower network differ from the predicted ones, and the reasons.

    `narrow` is the planned network at `config`; both take the positional arguments `inputs`.
    """
    exports = Exports(model, inputs)
    with tables_as_buffers(model, narrow):
        try:
            traced = exports.traced
            parts = {training: export_in_mode(narrow, inputs, training) for training in traced}
        except Exception:
            return {}  # without an export there is nothing to compare
        found, guesses = _trace(exports)
    if tuple(found.groups) != tuple(config):
        return {}  # the plan in use was made in another way
    return {
        segment.group: f"{node.name} reshapes it in another way than the graph shows"
        for training, whole in exports.traced.items()
        for node in misread(found, config, guesses, whole, parts[training])
        for _, axes in guesses[node].results
        for axis in axes
        for segment in axis or ()
    }


def _trace(exports: Exports) -> tuple[Plan, Guesses]:
    """The plan; if it keeps heads because they meet constants, perhaps their features narrow."""
    sources = SizeSources(exports.model, exports.inputs, exports.traced)
    known = Known(exports.model, exports.examples, sources)
    found, guesses, findings = _settled(exports, known)
    stuck = frozenset(
        node
        for node, axis in findings.cuts.items()
        for variable in findings.solver.variables([axis])
        if (findings.solver.fixed(variable) or "").startswith(MEETS_CONSTANT)
    )
    if stuck and found.rehearsed:
        other, others, _ = _settled(exports, replace(known, stuck=stuck), may_doubt=False)
        if other.rehearsed and _narrow_cost(other) < _narrow_cost(found):
            return other, others
    return found, guesses


def _settled(
    exports: Exports, known: Known, may_doubt: bool = True
) -> tuple[Plan, Guesses, Findings]:
    """Run the rules, and repeat them as long as a rehearsal shows something new.

    If no guess is left that a failed rehearsal blames, those on which the blamed ones depend are
    doubted too: some versions of torch notice a wrong size later than others. What comes of that
    counts if as much narrows as with the first guesses, whose faults verification finds.
    """
    rounds = 0
    first: tuple[Plan, Guesses, Findings] | None = None  # the result without doubts
    while True:
        findings = _run_all_rules(known, exports)
        if lengths := positions(findings):
            known = replace(known, positions=known.positions | lengths)
            continue
        found, guesses = build_plan(findings)
        rounds += 1
        if rounds > MOST_ROUNDS:
            return first or (found, guesses, findings)
        try:
            wrong = _rehearse(exports, found, guesses, rehearsal_config(found))
        except RehearsalFailed as failure:
            failed = _blamed(failure, known, findings)
            if failed is None and findings.reread and not may_doubt:
                failed = _as_first(known)
            elif failed is None and may_doubt:
                if first is None and findings.reread:
                    first = _settled(exports, _as_first(known), may_doubt=False)
                first = first or (found, guesses, findings)
                over = known.failed.keys() - findings.reread
                earlier = earlier_guesses(failure.blamed, guesses, over)
                failed = _failed_again(known, earlier) if earlier else None
            if failed is None:
                return first or (found, guesses, findings)  # verification will find out why
            known = failed
            continue
        if wrong:
            known = replace(known, misread=_read_otherwise(known, _news(wrong, guesses, known)))
        elif chance := _chance_readings(exports, known, found, guesses):
            known = replace(known, failed={**known.failed, **dict.fromkeys(chance, NO_MORE)})
        elif lost := _useless_readings(known, guesses):
            known = replace(known, misread={**known.misread, **lost})
        else:
            if findings.staying:
                _drop_followed(exports, found, findings)
                found, guesses = build_plan(findings)
            if first and _narrow_cost(first[0]) < _narrow_cost(found):
                return first
            found.rehearsed = True
            return found, guesses, findings


def _as_first(known: Known) -> Known:
    """As in the first guesses, of those that a failed rehearsal changed."""
    return replace(known, failed=dict.fromkeys(known.failed, NO_MORE))


def _narrow_cost(found: Plan) -> int:
    return found.macs(rehearsal_config(found))


def _drop_followed(exports: Exports, found: Plan, findings: Findings) -> None:
    """Forget numbers that follow the width after all: a size needed the attribute they are of."""
    for training, graph in exports.traced.items():
        copy = narrowed_copy(exports.model, found, rehearsal_config(found))
        narrow = export_in_mode(copy, exports.inputs, training)
        followed = followed_numbers(findings.staying, graph, narrow)
        findings.staying = [c for c in findings.staying if c.node not in followed]


def _blamed(failure: RehearsalFailed, known: Known, findings: Findings) -> Known | None:
    """The guesses to change after a narrow network failed; None if there are no others.

    Sizes are changed first. Then numbers keep their value, because an attribute that a number may
    come from can have other uses.
    """
    blamed = (failure.blamed, findings.sized)
    news = [[n for n in b if n not in known.failed or n in findings.reread] for b in blamed]
    if fresh := news[0] or news[1]:
        return _failed_again(known, fresh)
    numbers = [constant.node for constant in findings.constants]
    if numbers:
        never = dict.fromkeys(numbers, Misreading(None, NO_MORE))
        return replace(known, misread={**known.misread, **never})
    return None


def _failed_again(known: Known, nodes: Iterable[Node]) -> Known:
    times = {node: known.failed.get(node, 0) + 1 for node in nodes}
    return replace(known, failed={**known.failed, **times})


def _read_otherwise(known: Known, wrong: dict[Node, int | None]) -> dict[Node, Misreading]:
    """The known misreadings, with one more wrong guess counted for these operations."""
    times = {node: known.misread[node].times for node in wrong if node in known.misread}
    news = {node: Misreading(dim, times.get(node, 0) + 1) for node, dim in wrong.items()}
    return {**known.misread, **news}


class RehearsalFailed(Exception):
    """A narrower copy does not run; the guesses in `blamed` may be the reason."""

    def __init__(self, blamed: list[Node]) -> None:
        self.blamed = blamed


def _news(wrong: dict[Node, int | None], guesses: Guesses, known: Known) -> dict[Node, int | None]:
    """The operations to read differently: sizes first, then numbers that may follow an attribute.

    If sizes were right until an attribute followed the width, the attribute does not follow it.
    """
    numbers: dict[Node, int | None] = {n: None for n, g in guesses.items() if g.number is not None}
    tried = {node: dim for node, dim in numbers.items() if node in known.misread}
    sizes = {node: dim for node, dim in wrong.items() if node not in numbers}
    return (tried or sizes) if sizes else wrong


def _useless_readings(known: Known, guesses: Guesses) -> dict[Node, Misreading]:
    """Operations read in another way after a failure, with which nothing narrows either.

    Then the channels stay because of the operation, not because of what that reading ties them to.
    """
    taken = (node for node, times in known.failed.items() if 0 < times < NO_MORE)
    return {
        node: Misreading(None, NO_MORE)
        for node in taken
        if node not in guesses and node not in known.misread
    }


def _chance_readings(exports: Exports, known: Known, found: Plan, guesses: Guesses) -> list[Node]:
    """Readings after a failure that are only right if all groups narrow alike."""
    taken = {node for node, times in known.failed.items() if times < NO_MORE}
    if not taken:
        return []
    try:
        wrong = list(_rehearse(exports, found, guesses, uneven_config(found)))
    except RehearsalFailed as failure:
        wrong = failure.blamed
    return [node for node in wrong if node in taken]


def _rehearse(
    exports: Exports, found: Plan, guesses: Guesses, config: ChannelConfig
) -> dict[Node, int | None]:
    """Operations that do not behave as guessed at another width."""
    wrong: dict[Node, int | None] = {}
    for training, graph in exports.traced.items():
        if guesses.keys().isdisjoint(nodes_of(graph.graph_module)):
            continue
        copy = narrowed_copy(exports.model, found, config)
        try:
            narrow = export_in_mode(copy, exports.inputs, training)
        except Exception as error:
            nodes = list(nodes_of(graph.graph_module))
            raise RehearsalFailed(blamed_guesses(error, copy, nodes, guesses)) from error
        wrong |= misread(found, config, guesses, graph, narrow)
    return wrong


def _run_all_rules(known: Known, exports: Exports) -> Findings:
    found = Findings(known)
    add_tensors(found, exports)
    tie_attention(found, exports.seen.padded)
    tie_recurrent(found)
    for exported in exports.traced.values():
        run_rules(found, exported, held_tensors(exports.model, exported))
        if exported is exports.first:
            found.folds = folds(found.makers, exported)
            counted = list(found.products), list(found.uncounted)
    # The graph of training only shows which channels belong together.
    found.products, found.uncounted = counted
    keep_constants(found)
    keep_filters(found)
    keep_tables(found, exports)
    return found
