"""The axes of parameters and buffers: which are channels, and which never change."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.conv import _ConvNd

from anywidth.planning.trace.cursor import Reporter
from anywidth.planning.trace.exported_graphs import Exports, held_tensors, unused
from anywidth.planning.trace.solver import Pieces, TracedAxis, scaled
from anywidth.planning.trace.trace_findings import Findings, Follower
from anywidth.planning.trace.value import Traced, shape_of


def add_tensors(found: Findings, exports: Exports) -> None:
    """Add the parameters and buffers of all graphs by name, with a new variable per axis."""
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
            kernel = _kernel_dims(model, name, len(shape))
            axes = tuple(
                found.solver.new(n, why)
                if n > 1 and (name, i) not in known.positions and i not in kernel
                else None
                for i, n in enumerate(shape)
            )
            found.tensors[name] = Traced(shape, axes, name, source=name)


def _kernel_dims(model: nn.Module, name: str, rank: int) -> range:
    """The dimensions of a convolution's weight that no channels lie along.

    Code that normalises a weight merges them with its inputs before any layer shows which is which.
    """
    path, parametrized, _ = name.partition(".parametrizations.")
    owner = model.get_submodule(path if parametrized else path.rpartition(".")[0])
    is_weight = isinstance(owner, _ConvNd) and rank == 2 + len(owner.kernel_size)
    return range(2, rank) if is_weight else range(0)


def tie_attention(found: Findings, padded: set[nn.Module]) -> None:
    """Attention of torch has one width inside and outside: its heads times their size.

    That is `nn.MultiheadAttention`, and the function that it calls. For padded sequences, torch's
    encoder needs an even number of heads.
    """
    for path, module in found.known.model.named_modules():
        prefix = f"{path}." if path else ""
        if not isinstance(module, nn.MultiheadAttention):
            continue
        together = 2 if module in padded and module.num_heads % 2 == 0 else 1
        weights = {
            key.replace(".", "_"): prefix + key for key in (*_IN_ATTENTION, "out_proj.weight")
        }
        tied = _tie_heads(found, path, weights, module.num_heads, module.head_dim, together)
        if tied is None:
            continue
        heads, width = tied
        reporter = Reporter(found, "MultiheadAttention", path)
        same = ("embed_dim", "kdim", "vdim") if module._qkv_same_embed_dim else ("embed_dim",)
        reporter.bind(Follower(path, "num_heads", heads))
        for name in same:
            reporter.bind(Follower(path, name, width))
    for call in found.known.sources.attentions:
        if isinstance(found.known.model.get_submodule(call.path), nn.MultiheadAttention):
            continue
        size = call.width // call.heads
        tied = _tie_heads(found, call.path, call.weights, call.heads, size)
        reporter = Reporter(found, "multi_head_attention_forward", call.path)
        for source, axis in zip(call.sources, tied or (), strict=tied is not None):
            if source is not None:
                reporter.follow(source, axis)


_IN_ATTENTION = (
    "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"
)  # fmt: skip


def _tie_heads(
    found: Findings,
    path: str,
    weights: Mapping[str, str],
    count: int,
    size: int,
    together: int = 1,
) -> tuple[Pieces, Pieces] | None:
    """The heads of attention and its width, tied to weights, which are given by their names."""
    if weights.get("out_proj_weight") not in found.tensors:
        return None
    reporter = Reporter(found, "MultiheadAttention", path)
    # Of the function, what comes out may have another size.
    is_module = isinstance(reporter.module, nn.MultiheadAttention)
    heads = scaled(found.solver.new(count // together), together) or ()
    width = scaled(heads, size) or ()
    inside: dict[str, tuple[TracedAxis, ...]] = {
        "out_proj_weight": (width if is_module else None, width),
        "in_proj_weight": (width * 3, width),
        "in_proj_bias": (width * 3,),
        "q_proj_weight": (width, width),
        "k_proj_weight": (width,),
        "v_proj_weight": (width,),
    }
    for key, axes in inside.items():
        held = found.tensors.get(weights.get(key, ""))
        for own, axis in zip(held.axes if held else (), axes, strict=False):
            if axis is not None:
                reporter.unify(own, axis)
    return heads, width


def tie_recurrent(found: Findings) -> None:
    """Recurrent layers keep the sizes of their weights, and make their first states with them."""
    for path, module in found.known.model.named_modules():
        is_cell = isinstance(module, nn.RNNCellBase)
        if not is_cell and not isinstance(module, nn.RNNBase):
            continue
        prefix, suffix = f"{path}." if path else "", "" if is_cell else "_l0"
        reporter = Reporter(found, type(module).__name__, path)
        is_projected = getattr(module, "proj_size", 0) > 0
        for attribute, name in (
            ("input_size", "weight_ih"),
            ("proj_size" if is_projected else "hidden_size", "weight_hh"),
            ("hidden_size", "weight_hr"),
        ):
            held = found.tensors.get(prefix + name + suffix)
            if held is not None and held.axes[1] is not None:
                reporter.bind(Follower(path, attribute, held.axes[1]))


def keep_constants(found: Findings) -> None:
    """Fix the axes of buffers that no weight makes: filter banks, anchors, code books.

    Buffers that follow the channels of a layer, like running statistics, are made by that layer.
    """
    solver = found.solver
    made = solver.variables(found.made)
    # Rows of a parameter that a layer reads, such as centres, are learned as channels are.
    parameters = [v for name, v in found.tensors.items() if name not in found.buffers]
    rows = solver.variables(axis for value in parameters for axis in value.axes)
    learned = made | (rows & solver.variables(axis for _, axis in found.readers))
    for piece in solver.pieces(tuple((variable, 1) for variable in found.fresh)):
        if piece[0] not in learned:
            solver.fix((piece,), "an axis of a new tensor")
    for name in (name for name in found.tensors if name in found.buffers):
        for axis in found.tensors[name].axes:
            for piece in solver.pieces(axis):
                if piece[0] not in made:
                    solver.fix((piece,), f"an axis of the constant {name}")


def keep_filters(found: Findings) -> None:
    """Fix what frozen weights make of the network's input, or its output of: colours, filter banks.

    Without some of these channels a part of the picture would be lost, and training could not learn
    it again.
    """
    model, solver = found.known.model, found.solver
    modules = dict(model.named_modules())
    frozen = {path for path, module in modules.items() if _is_frozen(module)}
    if "" in frozen:
        return
    made = [(maker.layer, maker.axis) for maker in found.makers]
    for here, there, what in (
        (made, found.readers, "made of the input by frozen weights (requires_grad=False)"),
        (found.readers, made, "made an output by frozen weights (requires_grad=False)"),
    ):
        inner = {layer for layer, axis in there if solver.is_open(axis)}
        for variable, own in found.layers_by_variable(here).items():
            if frozen - inner >= set(own):
                solver.fix(((variable, 1),), what)


def _is_frozen(module: nn.Module) -> bool:
    held = list(module.parameters())
    return bool(held) and not any(p.requires_grad for p in held)


def positions(found: Findings) -> set[tuple[str, int]]:
    """Axes of parameters that no layer makes or reads, such as the number of learned tokens."""
    solver = found.solver
    read = [axis for _, axis in found.readers]
    channels = solver.variables([*found.made, *found.summed, *read])
    merged = solver.variables(found.merged)
    lengths = set()
    for name in found.tensors.keys() - found.buffers:
        for i, axis in enumerate(found.tensors[name].axes):
            own = solver.variables([axis])
            is_open = solver.is_open(axis) or not merged.isdisjoint(own)
            if is_open and own.isdisjoint(channels):
                lengths.add((name, i))
    return lengths
