"""Turn the batches of a loader into the arguments of a network, for calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import Dataset, IterableDataset

from anywidth.errors import AnywidthError
from anywidth.planning.call_arguments import (
    arguments_by_name,
    positional_arguments,
    required_arguments,
)
from anywidth.planning.parts import Example
from anywidth.slimming.converted_part import converted_parts
from anywidth.slimming.state import state_of

# A batch as positional arguments of the network: tensors, or dicts and lists of tensors.
Arguments = tuple[Any, ...]


class Whole(NamedTuple):
    """An argument without samples: a number, None, or a tensor that all samples share."""

    value: Any


def calibration_batches(
    loader: Iterable[Any], model: nn.Module, samples: int | None, as_they_are: bool = False
) -> Iterator[tuple[int, Any]]:
    """The first samples of a loader on the network's device, in batches of at least two.

    Each comes with its number of samples. With `as_they_are`, batches of any form count as one.
    """
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise AnywidthError(
            f"calibrate(): the loader is a {type(loader).__name__}, which yields single samples; "
            "expected batches: torch.utils.data.DataLoader(dataset, batch_size=64)"
        )
    is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if isinstance(loader, Tensor) or not is_iterable:
        what = f"a tensor of shape {tuple(loader.shape)}" if isinstance(loader, Tensor) else loader
        raise AnywidthError(
            f"calibrate(): the loader is {what}; expected an iterable of batches, such as a "
            "DataLoader or images.split(64)"
        )
    if as_they_are:
        device = next(model.parameters()).device
        return ((1, moved(batch, device)) for batch in loader)
    batches = _never_alone(_first_samples(_inputs(loader, model), samples))
    return (
        (_samples_in(batch), tuple(one.value if isinstance(one, Whole) else one for one in batch))
        for batch in batches
    )


def _wrapped(arguments: Arguments, model: nn.Module) -> Arguments:
    """Mark the arguments without samples, which the plan's example shows."""
    network = converted_parts(model).get("")
    example = [] if network is None else state_of(network).plan.example
    sizes = [_first_size(one) for one in example]
    batch = next((size for size in sizes if size is not None), None)

    def is_whole(place: int, one: Any) -> bool:
        if not isinstance(one, Tensor):
            return one is None or isinstance(one, bool | int | float | str)
        is_other = place < len(sizes) and sizes[place] not in (batch, None)
        return not one.dim() or is_other

    return tuple(Whole(one) if is_whole(i, one) else one for i, one in enumerate(arguments))


def _first_size(argument: Example) -> int | None:
    """The size of the first dimension of an argument in a plan; None if it has none."""
    shape = argument.get("shape", ()) if isinstance(argument, dict) else argument[0]
    return shape[0] if shape else None


def _inputs(loader: Iterable[Any], model: nn.Module) -> Iterator[Arguments]:
    device = next(model.parameters()).device
    axes: list[int] = []
    needed = required_arguments(model)
    for batch in loader:
        first = batch[0] if isinstance(batch, list | tuple) and len(batch) else batch
        if arguments_by_name(model, first):
            arguments = positional_arguments(model, first)
        elif isinstance(first, list | tuple):
            arguments = tuple(first)
        else:
            # A loader of (nodes, edges) or (nodes, edges, labels) has what `forward` needs.
            is_several = isinstance(batch, list | tuple) and len(batch) >= len(needed) > 1
            arguments = tuple(batch[: len(needed)]) if is_several else (first,)
        if len(arguments) < len(needed):
            raise AnywidthError(
                f"calibrate(): a batch has {len(arguments)} of the arguments that forward() of "
                f"{type(model).__name__} needs ({', '.join(needed)}); expected a tuple or dict of "
                "them; for other batches pass calibrate(..., forward=...)"
            )
        if len(arguments) > 1:
            arguments = _wrapped(arguments, model)
        several = [one for one in arguments if not isinstance(one, Whole)]
        if arguments[0] is not first:  # a single argument must be a tensor
            several = tree_leaves(several)
        for inputs in several:
            if not isinstance(inputs, Tensor) or not inputs.dim():
                raise AnywidthError(
                    f"calibrate(): a batch is a {type(inputs).__name__}; expected a tensor, or a "
                    "tuple that starts with a tensor or with a tuple or dict of the network's "
                    "arguments; for others pass calibrate(..., forward=...)"
                )
        shapes = ", ".join(str(tuple(inputs.shape)) for inputs in several)
        if len({inputs.shape[0] for inputs in several}) > 1:
            raise AnywidthError(
                f"calibrate(): arguments of shapes {shapes}: expected equal numbers of samples"
            )
        axes = axes or [inputs.dim() for inputs in several]
        if axes != [inputs.dim() for inputs in several]:
            raise AnywidthError(
                f"calibrate(): a batch of shape {shapes} after batches with {axes[0]} axes; for a "
                "single batch with labels, pass loader=[(images, labels)]"
            )
        if several and several[0].shape[0] > 0:
            yield moved(arguments, device)


def moved(batch: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda one: one.to(device, non_blocking=True), batch)


def _samples_in(inputs: Arguments) -> int:
    held = [one for one in inputs if not isinstance(one, Whole)]
    tensors = (one for one in tree_leaves(held) if isinstance(one, Tensor) and one.dim())
    return int(next(tensors).shape[0])


def _first_samples(batches: Iterator[Arguments], samples: int | None) -> Iterator[Arguments]:
    left = math.inf if samples is None else samples
    for inputs in batches:
        if left < _samples_in(inputs) and not _has_own(inputs):  # a graph cannot be cut
            most = int(left)
            inputs = _mapped(
                lambda one, n=most: one[:n] if isinstance(one, Tensor) else one, inputs
            )
        yield inputs
        left -= _samples_in(inputs)
        if left <= 0:
            return


def _never_alone(batches: Iterator[Arguments]) -> Iterator[Arguments]:
    """Join a batch of one sample, which has no variance, to its neighbour."""
    held: list[Arguments] = []
    alone: list[Arguments] = []
    for inputs in batches:
        joined = _joined([*alone, inputs])
        if _samples_in(joined) == 1 and not _has_own(joined):
            alone = [joined]
            continue
        yield from held
        held, alone = [joined], []
    if held or alone:
        yield _joined([*held, *alone])


def _has_own(inputs: Arguments) -> bool:
    """Whether a batch has a tensor that all its samples share, so that it cannot be joined."""
    return any(isinstance(one, Whole) and isinstance(one.value, Tensor) for one in inputs)


def _joined(batches: Sequence[Arguments]) -> Arguments:
    first, *others = batches

    def join(*parts: Any) -> Any:
        return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]

    return _mapped(join, first, *others) if others else first


def _mapped(change: Callable[..., Any], first: Arguments, *others: Arguments) -> Arguments:
    """Change the tensors of all arguments, except those without samples."""
    return tuple(
        parts[0] if isinstance(parts[0], Whole) else tree_map(change, *parts)
        for parts in zip(first, *others, strict=True)
    )
