"""The modules that operations were called in, by the paths that the network has for them."""

from __future__ import annotations

import re

from torch import nn
from torch.fx import GraphModule

from anywidth.planning.trace.nodes import nodes_of

# torch's name for a part of a container: `layers[1:]` is no module of the network.
_PART = re.compile(r"\.?slice\([^)]*\)")


def name_modules(model: nn.Module, graph: GraphModule) -> None:
    """Has operations in parts of containers name the modules that the network has.

    A part of a `nn.Sequential` keeps its keys, so that the path without the part is the module's.
    """
    for node in nodes_of(graph):
        stack = node.meta.get("nn_module_stack") or {}
        if any("slice(" in path for path, _ in stack.values()):
            named = {key: (_named(model, path), kind) for key, (path, kind) in stack.items()}
            node.meta["nn_module_stack"] = named


def _named(model: nn.Module, path: str) -> str:
    """The module of a path, or else the innermost one around it."""
    steps = _PART.sub("", path).lstrip(".").split(".")
    module: nn.Module | None = model
    for count, step in enumerate(steps):
        module = None if module is None else module._modules.get(step)
        if module is None:
            return ".".join(steps[:count])
    return ".".join(steps)
