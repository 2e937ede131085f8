"""How an exported network is called, and whether a written file computes the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from anywidth.errors import AnywidthError
from anywidth.planning.trace.exported_graphs import quiet

# Rounding differs between runtimes; a wrong operator differs by much more.
TOLERANCE = 1e-3
# In the check, axes of variable size are larger than in the example by this much.
_GROWTH = 3

Runner = Callable[..., list[Tensor]]


def _as_it_is(network: nn.Module) -> nn.Module:
    return network


@dataclass(frozen=True)
class Deployment:
    """How an exported network is called.

    Args:
        examples: an example per input, with a batch of at least two.
        input_names: the names of the inputs in the file.
        output_names: the names of the outputs in the file.
        free_axes: per input, the axes whose size may differ between calls: axis → name.
        takes: its input, in words.
        facts: name → text, stored in the file.
        task: the task it was trained for, in one word; None if it is not known.
        wrap: returns a module around the network, with steps that belong into the file too, such
            as the normalisation of images.
    """

    examples: tuple[Tensor, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    free_axes: tuple[Mapping[int, str], ...]
    takes: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    task: str | None = None
    wrap: Callable[[nn.Module], nn.Module] = _as_it_is

    def texts(self) -> dict[str, str]:
        """The texts that are stored in a file."""
        return {"takes": self.takes, **self.facts}

    def program(self, network: nn.Module) -> ExportedProgram:
        """The `torch.export` program of a plain network, in evaluation mode and on the CPU."""
        axes: Any = tuple(
            {axis: Dim(name) for axis, name in free.items()} for free in self.free_axes
        )
        wrapped = self.wrap(network).eval()
        parameters = inspect.signature(wrapped.forward).parameters.values()
        if any(one.kind is one.VAR_POSITIONAL for one in parameters):
            axes = (axes,)  # of the single argument that takes all inputs
        with torch.no_grad(), quiet():
            return torch.export.export(wrapped, self.examples, dynamic_shapes=axes, strict=False)

    def to_onnx(self, network: nn.Module, *, weights_as_they_are: bool = False) -> Any:
        """A plain network as an `onnx.ModelProto` with its weights.

        With `weights_as_they_are`, what is computed from weights alone is not computed in advance:
        the gates of recurrent layers, for example, are in another order in ONNX.
        """
        program = self.program(network)
        _copy_where_a_view_needs_it(program)
        try:
            with quiet(), sdpa_kernel(SDPBackend.MATH):
                converted = torch.onnx.export(
                    program, optimize=not weights_as_they_are, verbose=False
                )
                assert converted is not None
                if weights_as_they_are:
                    _optimize(converted.model, set(program.state_dict))
        except torch.onnx.OnnxExporterError as error:
            raise AnywidthError(
                f"{type(network).__name__} cannot be converted to ONNX: {_reason(error)}. Write "
                "this part of the network otherwise, or export single widths as PyTorch programs: "
                "torch.export.export(anywidth.extract(model, width), example)"
            ) from error
        graph = converted.model.graph
        names = zip(graph.inputs, self.input_names, strict=True)
        for value, name in (*names, *zip(graph.outputs, self.output_names, strict=True)):
            value.name = name
        converted.model.metadata_props.update(self.texts())
        return converted.model_proto

    def check(self, network: nn.Module, run: Runner, name: str) -> float:
        """Return the error of a written file; raise if it is more than rounding.

        The error is the largest difference between the outputs of `run` and of the network for
        random input, relative to the largest output.
        """
        values = self._random_inputs()
        with torch.no_grad(), quiet():
            true = tree_leaves(self.wrap(network).eval()(*values))
            found = run(*values)
        pairs = zip(found, true, strict=True)
        difference = max((_difference(one, wanted) for one, wanted in pairs), default=0.0)
        if not difference < TOLERANCE:
            raise AnywidthError(
                f"{name}: not written, because the converted network is wrong: its outputs differ "
                f"by {difference:.2g} of the largest output; expected less than {TOLERANCE:g}"
            )
        return difference

    def _random_inputs(self) -> list[Tensor]:
        """Random inputs; free axes have other sizes than in the examples."""
        generator = torch.Generator().manual_seed(0)
        found = []
        for example, free in zip(self.examples, self.free_axes, strict=True):
            shape = [size + _GROWTH * (axis in free) for axis, size in enumerate(example.shape)]
            if example.is_floating_point():
                found.append(torch.rand(shape, generator=generator, dtype=example.dtype))
            elif example.dtype == torch.uint8:
                found.append(torch.randint(256, shape, generator=generator, dtype=torch.uint8))
            else:  # they may be indices, and those of the example are valid
                places = torch.randint(example.numel(), shape, generator=generator)
                found.append(example.flatten()[places])
        return found


def _optimize(model: Any, weights: set[str]) -> None:
    """Optimize a converted network as `torch.onnx.export` does, but compute nothing from weights.

    A transposed weight is an exception, because it is as large as the weight and replaces it.
    """
    from onnxscript.optimizer import optimize_ir

    def folds(node: Any) -> bool | None:
        read = [value for value in node.inputs if value is not None and value.name in weights]
        if not any(value.dtype.is_floating_point() for value in read):
            return None
        return node.op_type == "Transpose" and len(read[0].uses()) == 1

    optimize_ir(model, should_fold=folds)


def _copy_where_a_view_needs_it(program: ExportedProgram) -> None:
    """Let `reshape` take the place of `view`, which fits only the strides of the export.

    The converter takes attention apart, whose result then has others.
    """
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    program.graph_module.recompile()


def _reason(error: BaseException) -> str:
    """The first line of what the converter met, without its advice to its own authors."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".!") if lines else type(error).__name__


def _difference(found: Tensor, true: Tensor) -> float:
    if found.shape != true.shape:
        return float("inf")
    if not true.is_floating_point():
        return 0.0 if torch.equal(found, true) else float("inf")
    return float((found - true).abs().max() / true.abs().max().clamp_min(1e-12))
