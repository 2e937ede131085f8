"""Exporting a network, and the parameters and buffers that its graphs use."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.nn.modules import transformer

from anywidth.errors import AnywidthError
from anywidth.planning.example_inputs import number_of_examples
from anywidth.planning.kept_results import results_forgotten
from anywidth.planning.model_outputs import hidden_names, plain_output
from anywidth.planning.modes import modes_kept
from anywidth.planning.part_calls import named_tensors
from anywidth.planning.trace.export_errors import export_failure
from anywidth.planning.trace.nodes import WRITTEN, nodes_of

# Loggers with which torch prints graphs and tracebacks if an export fails.
_TALKATIVE = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
# torch's name for a part of a container: `layers[1:]` is no module of the network.
_PART = re.compile(r"\.?slice\([^)]*\)")


@dataclass
class Seen:
    """Facts that the calls of a network show, but its graph does not.

    Args:
        hidden: names of hidden states that it returns beside its logits.
        padded: the modules of torch's encoders that are given padded sequences.
    """

    hidden: list[str] = field(default_factory=list)
    padded: set[nn.Module] = field(default_factory=set)


class Exports:
    """A network's graphs in evaluation and in training mode, each exported once, when asked for."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], examples: int = 0) -> None:
        self.model = model
        self.inputs = inputs
        self.examples = examples or number_of_examples(inputs)
        self._graphs: dict[bool, Any] = {}
        self._errors: list[Exception] = []
        self.seen = Seen()

    def get(self, training: bool) -> Any:
        """The graph in a mode; None if it cannot be exported."""
        if training not in self._graphs:
            self._graphs[training] = None
            try:
                graph = export_in_mode(self.model, self.inputs, training, self.seen)
                self._graphs[training] = graph
            except AnywidthError:
                raise
            except Exception as error:
                self._errors.append(error)
        return self._graphs[training]

    @cached_property
    def traced(self) -> dict[bool, Any]:
        """The graphs to read, by whether they are those of training: evaluation first.

        Training is read too if parameters or buffers wait for it (auxiliary heads) and are there,
        or if evaluation cannot be exported.
        """
        evaluation = self.get(False)
        idle = None if evaluation is None else unused(self.model, evaluation)
        if idle is not None and idle <= unsaved(self.model):
            return {False: evaluation}
        found = {training: self.get(training) for training in (False, True)}
        graphs = {training: graph for training, graph in found.items() if graph is not None}
        if len(graphs) == 2 and unused(self.model, graphs[True]) == idle:
            del graphs[True]
        if graphs:
            return graphs
        raise export_failure(self.model, self.inputs, self._errors[0]) from self._errors[0]

    @property
    def first(self) -> Any:
        """The graph whose costs count: that of evaluation if there is one."""
        return next(iter(self.traced.values()))


def export_in_mode(
    model: nn.Module, inputs: tuple[Any, ...], training: bool, seen: Seen | None = None
) -> Any:
    """A network's graph with plain containers of tensors; `seen` collects the rest."""
    seen = seen or Seen()

    def plain(module: nn.Module, given: Any, output: Any) -> Any:
        seen.hidden = hidden_names(output)
        return plain_output(output)

    def padded(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        arguments = inspect.signature(module.forward).bind(*given, **named).arguments
        if arguments.get("src_key_padding_mask") is not None:
            seen.padded.update(module.modules())

    with (
        modes_kept(model),
        _attributes_kept(model),
        results_forgotten(model),
        _readable_code(),
        quiet(),
        torch.no_grad(),
        contextlib.ExitStack() as hooks,
    ):
        model.train(training)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                hooks.enter_context(module.register_forward_pre_hook(padded, with_kwargs=True))
        hooks.enter_context(model.register_forward_hook(plain))
        exported = torch.export.export(model, inputs, strict=False)
    _name_modules(model, exported.graph_module)
    _keep_written_tensors(exported)
    return exported


def _name_modules(model: nn.Module, graph: GraphModule) -> None:
    """Have operations in parts of containers name the modules that the network has.

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


def _keep_written_tensors(exported: Any) -> None:
    """Keep with the inputs of a graph the tensors in the code that they stand for."""
    written = exported.graph_signature.inputs_to_lifted_tensor_constants
    for node in exported.graph.find_nodes(op="placeholder"):
        node.meta[WRITTEN] = exported.constants.get(written.get(node.name))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and output of torch during an export, which users cannot change.

    If an export fails, torch also prints graphs; the error says enough.
    """
    with contextlib.ExitStack() as stack:
        for name in _TALKATIVE:
            stack.enter_context(_replaced(logging.getLogger(name), "disabled", lambda _: True))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Remove tensors that a forward assigned, because those of an export have no values."""
    modules = list(model.modules())
    held = [(dict(vars(module)), dict(module._buffers)) for module in modules]
    made: list[str] = []
    try:
        yield
    finally:
        for module, (attributes, buffers) in zip(modules, held, strict=True):
            made += [n for n in _assigned(module._buffers, buffers) if buffers.get(n) is None]
            _assigned(vars(module), attributes)
    if made:
        raise AnywidthError(
            f"{type(model).__name__} makes the buffer {', '.join(dict.fromkeys(made))} when it "
            "first runs: run it once, model(*example_input), and plan it then"
        )


def _assigned(kept: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Restore attributes that tensors were assigned to; return their names."""
    new = [n for n, v in kept.items() if isinstance(v, Tensor) and v is not before.get(n)]
    for name in new:
        if name in before:
            kept[name] = before[name]
        else:
            del kept[name]
    return new


@contextlib.contextmanager
def _readable_code() -> Iterator[None]:
    """Functions of torch in a form that an export can follow, inside a `with` block."""
    poolers = sys.modules.get("torchvision.ops.poolers")
    enabled = torch.backends.mha.get_fastpath_enabled()
    with (
        _replaced(transformer, "_detect_is_causal_mask", lambda detect: _as_given),
        _replaced(torch._decomp.decompositions, "select_one_layer_lstm_function", _plain_states),
        _replaced(torch, "rand", _layers_kept),
        _replaced(poolers, "_multiscale_roi_align", lambda pool: _pooled_from_all),
    ):
        # Attention as its single operations, not as one fused operation.
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)


def _as_given(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    """Masks as they are: torch would read their values to see whether they are causal.

    If they are, torch can leave them out, with the same result.
    """
    return bool(is_causal)


def _plain_states(select: Any) -> Any:
    """The last states of an LSTM in their real shape.

    By a mistake, torch exports them with one more dimension, and the network's code would see it.
    """

    def selecting(values: Any, hidden: Any, params: Any) -> Any:
        layer = select(values, hidden, params)

        def plain(values: Any, hidden: Any, *rest: Any, **options: Any) -> Any:
            output, states = layer(values, hidden, *rest, **options)
            pairs = zip(states, hidden, strict=True)
            return output, tuple(s.squeeze(0) if s.dim() > h.dim() else s for s, h in pairs)

        return plain

    return selecting


def _layers_kept(draw: Any) -> Any:
    """One, where a single number is drawn: in training it decides whether a layer is left out.

    An export cannot follow what a drawn number decides.
    """

    def drawn(*sizes: Any, **options: Any) -> Any:
        is_listed = bool(sizes) and isinstance(sizes[0], list | tuple)
        shape = tuple(sizes[0]) if is_listed else sizes
        if options or shape not in ((), (1,)):
            return draw(*sizes, **options)
        return torch.tensor([1.0] if shape else 1.0)

    return drawn


def _pooled_from_all(maps: Any, boxes: Any, size: Any, ratio: int, scales: Any, mapper: Any) -> Any:
    """torchvision's pooling takes every box out of every map, and their sum.

    Which box belongs to which map depends on values; what happens to channels does not.
    """
    poolers = sys.modules["torchvision.ops.poolers"]
    regions = poolers._convert_to_roi_format(boxes)
    return sum(
        poolers.roi_align(one, regions, size, scale, ratio)
        for one, scale in zip(maps, scales, strict=True)
    )


@contextlib.contextmanager
def _replaced(place: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute inside a `with` block, if this version of torch has it."""
    before = getattr(place, name, None)
    if before is None:
        yield
        return
    setattr(place, name, change(before))
    try:
        yield
    finally:
        setattr(place, name, before)


def held_tensors(model: nn.Module, exported: Any) -> dict[str, str]:
    """The `state_dict` name of each graph input that is a parameter or buffer.

    A tensor that several modules share has the first of its names.
    """
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named_tensors(model):
        aliases[name] = names.setdefault(id(tensor), name)
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    specs = exported.graph_signature.input_specs
    return {spec.arg.name: aliases[spec.target] for spec in specs if spec.kind in kinds}


def unused(model: nn.Module, exported: Any) -> set[str]:
    """The names of parameters and buffers that a graph does not use, except counters."""
    held = held_tensors(model, exported)
    used = {held[node.name] for node in exported.graph.nodes if node.name in held and node.users}
    names = {name for name, _ in model.named_parameters()}
    names |= {name for name, buffer in model.named_buffers() if buffer.dim() > 0}
    return names - used


def unsaved(model: nn.Module) -> set[str]:
    """The names of buffers that are not saved: tables that can be computed again."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
