"""Buffers that training writes into, and that narrow."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _NormBase

from anywidth.planning.groups import Plan
from anywidth.planning.spectral_norms import spectral_vectors
from anywidth.planning.trace.exported_graphs import Exports, held_tensors


def note_written_buffers(plan: Plan, exports: Exports) -> None:
    """Note the buffers that all widths write to, such as the statistics of a user's own norm.

    An axis that follows several stretches of such a buffer is fixed: the active part would be a
    copy, and written values would be lost. Note statistics that nothing writes, too.
    """
    frozen = _frozen(plan, exports)
    if frozen:
        plan.notes.append(
            f"{len(frozen)} frozen batch norms, such as {frozen[0]}, keep the statistics of the "
            "full width at every width, and calibrate() leaves them: use nn.BatchNorm2d instead"
        )
    for name in _written(plan, exports):
        plan.notes.append(
            f"all widths update the one {name} in training, and calibrate() leaves it as it is"
        )
        for axis in plan.tensors[name]:
            for segment in axis if axis is not None and len(axis) > 1 else ():
                if plan.can_narrow(segment.group):
                    plan.pin(segment.group, f"joined with others in {name}, where training writes")


def _frozen(plan: Plan, exports: Exports) -> list[str]:
    """Norms, by what libraries call them, with statistics that narrow and are never updated."""
    named = exports.model.named_modules()
    paths = [path for path, module in named if "FrozenBatchNorm" in type(module).__name__]
    axes = {path: plan.tensors.get(f"{path}.running_var", ()) for path in paths}
    return [path for path in paths if any(axis is not None for axis in axes[path])]


def _written(plan: Plan, exports: Exports) -> list[str]:
    model = exports.model
    own = {name for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    own -= {*spectral_vectors(model)}
    narrow = [name for name in own if any(axis is not None for axis in plan.tensors.get(name, ()))]
    norms = {path for path, module in model.named_modules() if isinstance(module, _NormBase)}
    if all(name.rpartition(".")[0] in norms for name in narrow):
        return []
    return sorted(updated_buffers(exports).intersection(narrow))


def updated_buffers(exports: Exports) -> set[str]:
    """The names of buffers that training changes, except those of torch's own norms."""
    training = exports.get(True)
    if training is None:
        return set()  # without an export there is nothing to see
    held = held_tensors(exports.model, training)
    found = set()
    for node in training.graph.nodes:
        arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
        if arguments and arguments[0].is_write:
            changed = node.args[0]
            while changed.op == "call_function" and changed.all_input_nodes:
                changed = changed.all_input_nodes[0]  # for example a part of it
            if changed.name in held:
                found.add(held[changed.name])
    return found
