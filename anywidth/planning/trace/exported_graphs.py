"""Exporting a network, and the parameters and buffers that its graphs use."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind

from anywidth.errors import AnywidthError
from anywidth.modes import modes_kept

# What torch prints graphs and tracebacks by where an export fails.
_TALKATIVE = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


class Exports:
    """A network's graphs in evaluation and in training mode, each exported once, when asked for."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.model = model
        self.inputs = inputs
        self._graphs: dict[bool, Any] = {}
        self._errors: list[str] = []

    def get(self, training: bool) -> Any:
        """The graph in a mode; None if it cannot be exported."""
        if training not in self._graphs:
            self._graphs[training] = None
            try:
                self._graphs[training] = export_in_mode(self.model, self.inputs, training)
            except Exception as error:
                lines = str(error).strip().splitlines() or ["no message"]
                self._errors.append(f"{type(error).__name__}: {lines[0]}")
        return self._graphs[training]

    @cached_property
    def traced(self) -> dict[bool, Any]:
        """The graphs to read, by whether they are those of training: evaluation first.

        Training is read too if parameters or buffers wait for it (auxiliary heads), or if
        evaluation cannot be exported.
        """
        evaluation = self.get(False)
        if evaluation is not None and not unused(self.model, evaluation):
            return {False: evaluation}
        found = {training: self.get(training) for training in (False, True)}
        graphs = {training: graph for training, graph in found.items() if graph is not None}
        if graphs:
            return graphs
        shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in self.inputs]
        raise AnywidthError(
            f"{type(self.model).__name__} could not be exported with the example input {shapes}: "
            f"{self._errors[0]}. Check that model(*example_input) runs, with a batch of at least "
            "2, and that forward() does not branch on the values of tensors"
        )

    @property
    def first(self) -> Any:
        """The graph whose costs count: that of evaluation if there is one."""
        return next(iter(self.traced.values()))


def export_in_mode(model: nn.Module, inputs: tuple[Any, ...], training: bool) -> Any:
    with modes_kept(model), _readable_attention(), quiet(), torch.no_grad():
        model.train(training)
        return torch.export.export(model, inputs, strict=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps back what torch warns of and prints while it exports, which nobody here can change.

    Where it fails it prints graphs too; the error says all.
    """
    logs = [logging.getLogger(name) for name in _TALKATIVE]
    were_disabled = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, was_disabled in zip(logs, were_disabled, strict=True):
            log.disabled = was_disabled


@contextlib.contextmanager
def _readable_attention() -> Iterator[None]:
    """Attention exported as the operations it is made of, not as one fused operation."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def held_tensors(model: nn.Module, exported: Any) -> dict[str, str]:
    """The `state_dict` name of each graph input that is a parameter or buffer.

    A tensor that several modules share goes by the first of its names.
    """
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            aliases[name] = names.setdefault(id(tensor), name)
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    specs = exported.graph_signature.input_specs
    return {spec.arg.name: aliases[spec.target] for spec in specs if spec.kind in kinds}


def unused(model: nn.Module, exported: Any) -> set[str]:
    """The names of parameters and buffers that take no part in a graph; counters aside."""
    held = held_tensors(model, exported)
    used = {held[node.name] for node in exported.graph.nodes if node.name in held and node.users}
    names = {name for name, _ in model.named_parameters()}
    names |= {name for name, buffer in model.named_buffers() if buffer.dim() > 0}
    return names - used
