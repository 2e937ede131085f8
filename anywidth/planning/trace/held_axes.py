"""The axes of parameters and buffers: which are channels, and which never change."""

from __future__ import annotations

from torch import nn

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.exported_graphs import Exports, held_tensors, unused
from anywidth.planning.trace.trace_findings import Findings
from anywidth.planning.trace.value import Traced, shape_of


def add_tensors(found: Findings, exports: Exports) -> None:
    """Adds the parameters and buffers of all graphs by name, every axis of them free as yet."""
    model, known = exports.model, found.known
    idle = set.intersection(*(unused(model, graph) for graph in exports.traced.values()))
    for exported in exports.traced.values():
        held = held_tensors(model, exported)
        for node in exported.graph.nodes:
            name = held.get(node.name)
            if name is None or name in found.tensors:
                continue
            shape = shape_of(node.meta["val"])
            why = "takes no part in the traced forward" if name in idle else None
            axes = tuple(
                found.solver.new(n, why) if n > 1 and (name, i) not in known.positions else None
                for i, n in enumerate(shape)
            )
            found.tensors[name] = Traced(shape, axes, name, source=name)


def tie_attention(found: Findings) -> None:
    """`nn.MultiheadAttention` has one width inside and out: its heads times their size."""
    for path, module in found.known.model.named_modules():
        prefix = f"{path}." if path else ""
        is_attention = isinstance(module, nn.MultiheadAttention)
        if not is_attention or f"{prefix}out_proj.weight" not in found.tensors:
            continue
        cursor = Cursor(found, "MultiheadAttention", path)
        heads = found.solver.new(module.num_heads)
        width = tuple((variable, module.head_dim) for variable, _ in heads)
        inside = {
            "out_proj.weight": (width, width),
            "in_proj_weight": (width * 3, width),
            "in_proj_bias": (width * 3,),
            "q_proj_weight": (width, width),
            "k_proj_weight": (width,),
            "v_proj_weight": (width,),
        }
        for name, axes in inside.items():
            if prefix + name in found.tensors:
                for own, axis in zip(found.tensors[prefix + name].axes, axes, strict=False):
                    cursor.unify(own, axis)
        same = ("embed_dim", "kdim", "vdim") if module._qkv_same_embed_dim else ("embed_dim",)
        cursor.bind(path, "num_heads", heads)
        for name in same:
            cursor.bind(path, name, width)


def keep_constants(found: Findings) -> None:
    """Fixes the axes of buffers that no weight makes: filter banks, anchors, code books.

    Those that follow a layer's channels, like running statistics, are made by that layer.
    """
    solver = found.solver
    made = solver.variables(found.made)
    for name in found.buffers & found.tensors.keys():
        for axis in found.tensors[name].axes:
            for piece in solver.pieces(axis):
                if piece[0] not in made:
                    solver.fix((piece,), f"an axis of the constant {name}")


def positions(found: Findings) -> set[tuple[str, int]]:
    """Axes of parameters that no layer makes or reads: of learned tokens, how many there are."""
    solver = found.solver
    read = [axis for _, axis in found.readers]
    channels = solver.variables([*found.made, *found.summed, *read])
    merged = solver.variables(found.merged)
    lengths = set()
    for name in found.tensors.keys() - found.buffers:
        for i, axis in enumerate(found.tensors[name].axes):
            own = solver.variables([axis])
            is_open = any(solver.fixed(v) is None or v in merged for v in own)
            if is_open and own.isdisjoint(channels):
                lengths.add((name, i))
    return lengths
