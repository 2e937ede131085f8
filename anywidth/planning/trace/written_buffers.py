"""Buffers that training writes into, and that narrow."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _NormBase

from anywidth.planning.groups import Plan
from anywidth.planning.trace.exported_graphs import Exports, held_tensors


def note_written_buffers(plan: Plan, exports: Exports) -> None:
    """Notes the buffers that all widths write into: the statistics of a norm of one's own.

    What follows several stretches of one is fixed: its active part is a copy then, and what is
    written there would be lost.
    """
    for name in _written(plan, exports):
        plan.notes.append(
            f"all widths update the one {name} in training, and calibrate() leaves it as it is"
        )
        for axis in plan.tensors[name]:
            for segment in axis if axis is not None and len(axis) > 1 else ():
                if plan.can_narrow(segment.group):
                    plan.pin(segment.group, f"joined with others in {name}, where training writes")


def _written(plan: Plan, exports: Exports) -> list[str]:
    model = exports.model
    own = {name for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    narrow = [name for name in own if any(axis is not None for axis in plan.tensors.get(name, ()))]
    norms = {path for path, module in model.named_modules() if isinstance(module, _NormBase)}
    if all(name.rpartition(".")[0] in norms for name in narrow):
        return []
    return sorted(updated_buffers(exports).intersection(narrow))


def updated_buffers(exports: Exports) -> set[str]:
    """The names of buffers that training changes, torch's own norms' aside."""
    training = exports.get(True)
    if training is None:
        return set()  # what cannot be exported cannot be looked at
    held = held_tensors(exports.model, training)
    found = set()
    for node in training.graph.nodes:
        arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
        if arguments and arguments[0].is_write:
            changed = node.args[0]
            while changed.op == "call_function" and changed.all_input_nodes:
                changed = changed.all_input_nodes[0]  # a part of it, say
            if changed.name in held:
                found.add(held[changed.name])
    return found
