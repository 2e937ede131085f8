"""The arguments that a plan was made with: how they are saved and made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from anywidth.errors import AnywidthError
from anywidth.planning.call_arguments import positional_arguments
from anywidth.planning.groups import Plan
from anywidth.planning.parts import DEEPEST, Example

# At most this many whole numbers, often indices, are saved; of more, only their range.
MOST_VALUES = 4096


def described(argument: Any, depth: int = DEEPEST) -> Example:
    """An argument as a plan saves it; `depth` is how many lists and dicts may hold each other."""
    if isinstance(argument, Tensor):
        shape, dtype = list(argument.shape), str(argument.dtype).removeprefix("torch.")
        is_drawn = argument.dtype.is_floating_point or argument.dtype.is_complex
        if is_drawn or argument.dtype is torch.uint8 or argument.is_meta or not argument.numel():
            return tuple(shape), dtype
        if argument.numel() <= MOST_VALUES:
            return {"shape": shape, "dtype": dtype, "values": argument.flatten().tolist()}
        ends = {"low": int(argument.min()), "high": int(argument.max())}
        return {"shape": shape, "dtype": dtype, **ends}
    if argument is None or isinstance(argument, bool | int | float | str):
        return {"value": argument}
    if type(argument) in (list, tuple) and depth:
        items = [described(item, depth - 1) for item in argument]
        if not any(map(_is_unknown, items)):
            return {"items": items}
    if type(argument) is dict and depth and all(isinstance(key, str) for key in argument):
        named = {key: described(item, depth - 1) for key, item in argument.items()}
        if not any(map(_is_unknown, named.values())):
            return {"named": named}
    return {"type": type(argument).__name__}


def _is_unknown(argument: Example) -> bool:
    return isinstance(argument, dict) and "type" in argument


def is_images(argument: Any) -> TypeGuard[Sequence[Tensor]]:
    """Whether an argument is a list of images, which is how detectors take a batch."""
    is_list = isinstance(argument, list | tuple) and len(argument) > 0
    return is_list and all(isinstance(x, Tensor) and x.dim() == 3 for x in argument)


def number_of_examples(inputs: tuple[Any, ...]) -> int:
    """The batch size: the first dimension of the first tensor."""
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim() > 0]
    return int(tensors[0].shape[0]) if tensors else 1


def example_inputs(model: nn.Module, plan: Plan, given: Any = None) -> tuple[Any, ...]:
    """Arguments to run the network with: those given, the plan's own, or some like them.

    The plan's arguments get the network's current precision.
    """
    if given is not None:
        return positional_arguments(model, given)
    first = next(iter(model.parameters()), None)
    device = first.device if first is not None else torch.device("cpu")

    def placed(value: Tensor) -> Tensor:
        both_float = value.is_floating_point() and first is not None and first.is_floating_point()
        return value.to(device, first.dtype if both_float and first is not None else value.dtype)

    generator = torch.Generator().manual_seed(0)
    inputs = plan.given or tuple(
        _made(argument, f"argument {number} of {type(model).__name__}", generator)
        for number, argument in enumerate(plan.example, 1)
    )
    return tuple(tree_map_only(Tensor, placed, inputs))


def _made(argument: Example, name: str, generator: torch.Generator) -> Any:
    """An argument like the one that was described; floats are random."""
    if not isinstance(argument, dict):
        shape, dtype = argument[0], getattr(torch, argument[1])
        if dtype is torch.uint8:  # pixels
            return torch.randint(256, shape, generator=generator, dtype=dtype)
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=generator, dtype=dtype)
        return torch.zeros(shape, dtype=dtype)
    match argument:
        case {"value": value}:
            return value
        case {"items": items}:
            return [_made(item, name, generator) for item in items]
        case {"named": named}:
            return {key: _made(item, name, generator) for key, item in named.items()}
        case {"type": kind}:
            raise AnywidthError(
                f"{name} was a {kind} in the plan's example, and a plan keeps only tensors, "
                "numbers, text, and lists and dicts of these: pass the arguments again with "
                "example_input=(...)"
            )
    shape, dtype = argument["shape"], getattr(torch, argument["dtype"])
    if "values" in argument:
        return torch.tensor(argument["values"]).to(dtype).reshape(shape)
    high = argument["high"] + 1
    return torch.randint(argument["low"], high, shape, generator=generator).to(dtype)
