"""Tensors that run but that no graph shows, since nothing depends on them: an unused norm, say.

Export leaves out what no output needs, and fails on code that only training runs. Such tensors stay
whole in the plan, and the code that uses them fails at other widths.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from anywidth.planning.cuts import held_tensor
from anywidth.planning.groups import Axis, Plan, Segment
from anywidth.slimming.layers import dress, narrow, widen
from anywidth.slimming.record import record_of


def unseen_tensors(
    model: nn.Module, plan: Plan, group: str, modules: Iterable[str]
) -> dict[str, tuple[Axis, ...]]:
    """Whole tensors of some modules with an axis as long as a group, and axes that follow it."""
    own = plan.groups[group]
    segments = (Segment(group, own.unit),)
    found: dict[str, tuple[Axis, ...]] = {}
    for path in modules:
        module = model.get_submodule(path)
        for key in (*module._parameters, *module._buffers):
            name = f"{path}.{key}".lstrip(".")
            is_whole = name in plan.tensors and all(axis is None for axis in plan.tensors[name])
            if is_whole and own.channels in plan.shapes[name] and len(plan.shapes[name]) == 1:
                found[name] = (segments,)
    return found


class Narrowed:
    """The modules of some tensors, which see the active part from now on; `undo` takes it back."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._before: list[tuple[nn.Module, tuple[str, ...] | None]] = []
        for name in names:
            path, _, key = name.rpartition(".")
            module = model.get_submodule(path)
            assert held_tensor(module, key) is not None
            record = record_of(module)
            self._before.insert(0, (module, None if record is None else record.tensors))
            if record is None:
                narrow(module, [key])
            else:
                record.tensors = tuple(sorted({*record.tensors, key}))
                dress(module)

    def undo(self) -> None:
        for module, tensors in self._before:
            record = record_of(module)
            assert record is not None
            if tensors is None:
                widen(module)
            else:
                record.tensors = tensors
                dress(module)
