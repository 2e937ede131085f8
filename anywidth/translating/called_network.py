"""Call any network with tensors only, and get a tuple of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from anywidth.errors import AnywidthError
from anywidth.planning.example_inputs import example_inputs
from anywidth.planning.groups import Plan
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.state import state_of
from anywidth.slimming.verifying.trial import run
from anywidth.translating.deployment import Deployment


class CalledNetwork(nn.Module):
    """Takes only tensors and returns a tuple of tensors; all other arguments are fixed.

    Args:
        network: takes arguments and returns tensors in any structure.
        leaves: of its arguments: whether each is a tensor, which calls pass, and its value if not.
        structure: the structure of the arguments.
    """

    def __init__(self, network: nn.Module, leaves: Sequence[Any], structure: TreeSpec) -> None:
        super().__init__()
        self.network = network
        self.leaves, self.structure = list(leaves), structure

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if is_tensor else leaf for is_tensor, leaf in self.leaves]
        found = self.network(*tree_unflatten(leaves, self.structure))
        return tuple(leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor))


def described(
    model: nn.Module,
    example_input: Any = None,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    facts: Mapping[str, str] | None = None,
) -> Deployment:
    """How a converted network is called, found by calling it; see `export_bundle`."""
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise AnywidthError("this network is not on the CPU: call model.cpu() before exporting it")
    plan = state_of(model).plan
    arguments = example_inputs(model, plan, example_input)
    leaves, structure = tree_flatten(arguments)
    kinds = [(isinstance(x, Tensor), None if isinstance(x, Tensor) else x) for x in leaves]

    def called(network: nn.Module) -> nn.Module:
        return CalledNetwork(network if wrap is None else wrap(network), kinds, structure)

    small = extract_quietly(model, plan.narrowest, fold=True)
    examples = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    outputs = run(called(small).eval(), examples)
    if any(isinstance(one, Tensor) and one.is_complex() for one in outputs):
        raise AnywidthError(
            f"{type(model).__name__} returns complex numbers, which ONNX does not have: return "
            "torch.view_as_real(...) of them, or add it with export_bundle(..., wrap=...)"
        )
    deployment = Deployment(
        examples,
        _names(input_names, _argument_names(model, arguments), "input"),
        _names(output_names, _numbered("output", len(outputs)), "output"),
        tuple({0: "batch"} if x.dim() else {} for x in examples),
        facts=facts or {},
        wrap=called,
    )
    try:
        deployment.program(small)
    except Exception:  # torch has no error class for a network that takes only one batch size
        deployment = replace(deployment, free_axes=tuple({} for _ in examples))
        if plan.parts and wrap is None:
            _check_whole(deployment, small, plan)
    return deployment


def _check_whole(deployment: Deployment, network: nn.Module, plan: Plan) -> None:
    """Refuse a network that was planned in parts because it cannot be exported."""
    try:
        deployment.program(network)
    except Exception as error:
        raise AnywidthError(
            f"{type(network).__name__} was planned in parts {plan.parts}, and cannot be exported "
            "as a whole: pass export_bundle(..., wrap=lambda model: ...), a module that runs its "
            "parts alone, and the example_input of that module"
        ) from error


def _names(given: Sequence[str] | None, found: list[str], kind: str) -> tuple[str, ...]:
    if given is None:
        return tuple(found)
    if isinstance(given, str) or len(given) != len(found) or len(set(given)) != len(given):
        raise AnywidthError(
            f"{kind}_names={given!r}: expected {len(found)} different names, such as {found}"
        )
    return tuple(given)


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}_{number}" for number in range(1, count + 1)]


def _argument_names(model: nn.Module, arguments: tuple[Any, ...]) -> list[str]:
    """The names of `forward`'s arguments; a tensor inside one also has its place in the name."""
    try:
        known = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        known = []
    found = []
    for place, argument in enumerate(arguments):
        name = known[place] if place < len(known) else f"input_{place + 1}"
        for path, leaf in tree_flatten_with_path(argument)[0]:
            if isinstance(leaf, Tensor):
                inside = "".join(c if c.isalnum() else "_" for c in keystr(path)).strip("_")
                found.append(f"{name}_{inside}" if inside else name)
    return found if len(set(found)) == len(found) else _numbered("input", len(found))
