"""The batch norms at the end of residual branches."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Node

from anywidth.planning.trace.exported_graphs import export_in_mode, held_tensors
from anywidth.planning.trace.nodes import nodes_of, op_name


def residual_scales(model: nn.Module, inputs: tuple[Any, ...]) -> list[str]:
    """The names of the scales of norms at the end of residual branches.

    If both sides of a sum end in a norm, as with a projected shortcut, the longer side is the
    branch.
    """
    exported = export_in_mode(model, inputs, training=False)
    held = held_tensors(model, exported)
    depths: dict[Node, int] = {}
    found: list[str] = []
    for node in nodes_of(exported.graph_module):
        before = node.all_input_nodes
        depths[node] = 1 + max((depths.get(one, 0) for one in before), default=0)
        sides = [side for side in before if side.name not in held]
        if op_name(node.target) != "add" or len(sides) < 2:
            continue
        called = (side for side in sides if side.op == "call_function")
        norms = [side for side in called if "batch_norm" in op_name(side.target)]
        for norm in sorted(norms, key=lambda side: depths[side])[-1:]:
            scale = norm.args[1]
            name = held.get(scale.name) if isinstance(scale, Node) else None
            if name is not None and name not in found:
                found.append(name)
    return found
