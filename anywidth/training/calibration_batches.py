"""Turn the batches of a loader into the arguments of a network, for calibration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, IterableDataset

from anywidth.errors import AnywidthError

# A batch as positional arguments of the network: tensors, or dicts and lists of tensors.
Arguments = tuple[Any, ...]


def calibration_batches(
    loader: Iterable[Any], model: nn.Module, samples: int | None
) -> Iterator[Arguments]:
    """The first samples of a loader on the network's device, in batches of at least two."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise AnywidthError(
            f"calibrate(): the loader is a {type(loader).__name__}, which yields single samples; "
            "expected batches: torch.utils.data.DataLoader(dataset, batch_size=64)"
        )
    if isinstance(loader, Tensor) or not _can_be_iterated(loader):
        what = f"a tensor of shape {tuple(loader.shape)}" if isinstance(loader, Tensor) else loader
        raise AnywidthError(
            f"calibrate(): the loader is {what}; expected an iterable of batches, such as a "
            "DataLoader or images.split(64)"
        )
    return _never_alone(_first_samples(_inputs(loader, model), samples))


def _can_be_iterated(loader: Any) -> bool:
    return hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")


def _inputs(loader: Iterable[Any], model: nn.Module) -> Iterator[Arguments]:
    device = next(model.parameters()).device
    axes: list[int] = []
    for batch in loader:
        first = batch[0] if isinstance(batch, list | tuple) and len(batch) else batch
        arguments = tuple(first) if isinstance(first, list | tuple) else (first,)
        several = tree_leaves(arguments) if isinstance(first, list | tuple) else [first]
        for inputs in several:
            if not isinstance(inputs, Tensor) or not inputs.dim():
                raise AnywidthError(
                    f"calibrate(): a batch is a {type(inputs).__name__}; expected a tensor, or a "
                    "tuple that starts with a tensor or with a tuple of the network's arguments"
                )
        if len({inputs.shape[0] for inputs in several}) > 1:
            shapes = ", ".join(str(tuple(inputs.shape)) for inputs in several)
            raise AnywidthError(
                f"calibrate(): arguments of shapes {shapes}: expected equal numbers of samples"
            )
        axes = axes or [inputs.dim() for inputs in several]
        if axes != [inputs.dim() for inputs in several]:
            shapes = ", ".join(str(tuple(inputs.shape)) for inputs in several)
            raise AnywidthError(
                f"calibrate(): a batch of shape {shapes} after batches with {axes[0]} axes; for a "
                "single batch with labels, pass loader=[(images, labels)]"
            )
        if several and several[0].shape[0] > 0:
            yield tree_map(lambda one: one.to(device, non_blocking=True), arguments)


def samples_in(inputs: Arguments) -> int:
    return int(tree_leaves(inputs)[0].shape[0])


def _first_samples(batches: Iterator[Arguments], samples: int | None) -> Iterator[Arguments]:
    if samples is None:
        yield from batches
        return
    left = samples
    for inputs in batches:
        yield tree_map(lambda one, most=left: one[:most], inputs)
        left -= samples_in(inputs)
        if left <= 0:
            return


def _never_alone(batches: Iterator[Arguments]) -> Iterator[Arguments]:
    """Join a batch of one sample, which has no variance, to its neighbour."""
    held: list[Arguments] = []
    alone: list[Arguments] = []
    for inputs in batches:
        joined = _joined([*alone, inputs])
        if samples_in(joined) == 1:
            alone = [joined]
            continue
        yield from held
        held, alone = [joined], []
    if held or alone:
        yield _joined([*held, *alone])


def _joined(batches: Sequence[Arguments]) -> Arguments:
    if len(batches) == 1:
        return batches[0]
    first, *others = batches
    return tree_map(lambda *parts: torch.cat(parts), first, *others)
