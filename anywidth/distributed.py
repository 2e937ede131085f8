"""Several processes: their ranks and devices, and one gradient reduction per step."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from anywidth.errors import AnywidthError

Group: TypeAlias = "dist.ProcessGroup | Literal['world'] | None"
"""Processes that train one network: a group, all that torchrun started, or this one alone."""


def _import_without_group() -> None:
    """Import a module that would keep the group alive after `destroy_process_group`.

    At its first import this module of torch keeps the current group as a default argument, and
    exporting a network imports it. Gloo's threads would then still run while Python exits, which
    sometimes aborts the process.
    """
    world = dist.group.WORLD
    dist.group.WORLD = None
    try:
        importlib.import_module("torch.distributed.nn.functional")
    finally:
        dist.group.WORLD = world


if dist.is_available():
    _import_without_group()


def start_processes(device: torch.device) -> None:
    """Join the group that `torchrun` started; does nothing in a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def stop_processes() -> None:
    if _is_joined():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if _is_joined() else 0


def world_size() -> int:
    return dist.get_world_size() if _is_joined() else 1


def _is_joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def local_device(name: str) -> torch.device:
    """The device of this process: `auto` takes a GPU if there is one, a separate one per rank."""
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise AnywidthError(f"device {name!r}: expected auto, cpu, cuda or cuda:N")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise AnywidthError(
            f"device {name!r}: torch finds no CUDA GPU on this machine; use --device cpu"
        )
    device = torch.device(name if ":" in name else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise AnywidthError(
            f"device {name!r}: this machine has {torch.cuda.device_count()} GPUs, numbered from 0"
        )
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """The name of a device in reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


def members(group: Group) -> dist.ProcessGroup | None:
    """The processes that work together; None if this one is alone."""
    if group not in ("world", None) and not isinstance(group, dist.ProcessGroup):
        raise AnywidthError(
            f"process_group={group!r}: expected a torch.distributed.ProcessGroup, 'world' or None"
        )
    if group is None or not _is_joined():
        return None
    found = dist.group.WORLD if group == "world" else group
    return found if found is not None and found.size() > 1 else None


def average(tensors: Iterable[Tensor], group: Group = "world") -> None:
    """Average tensors over all ranks, in place and in one reduction per dtype."""
    found = members(group)
    if found is not None:

        def mean(flat: Tensor) -> None:
            dist.all_reduce(flat, group=found)
            flat /= found.size()

        _exchange(tensors, mean)


def send_from_first_rank(
    model: nn.Module, parameters: Iterable[nn.Parameter], group: Group = "world"
) -> None:
    """Give all ranks the first rank's weights and statistics, as DistributedDataParallel does.

    Only gradients are averaged: ranks that start with different weights would stay different.
    """
    found = members(group)
    if found is not None:
        tensors = [*parameters, *model.buffers()]
        _exchange(tensors, lambda flat: dist.broadcast(flat, group=found, group_src=0))


@torch.no_grad()
def _exchange(tensors: Iterable[Tensor], exchange: Callable[[Tensor], object]) -> None:
    """Change tensors, except sharded ones, in place and as one flat tensor per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if not is_sharded(tensor):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        flat = _flatten_dense_tensors(same)
        exchange(flat)
        torch._foreach_copy_(same, list(_unflatten_dense_tensors(flat, same)))


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds a part of a parameter, as with FSDP2, which reduces gradients."""
    return hasattr(tensor, "device_mesh")


def check_not_sharded(model: nn.Module, function: str) -> None:
    if any(map(is_sharded, model.parameters())):
        raise AnywidthError(
            f"{function}(): this {type(model).__name__} is sharded by FSDP. Load its full state "
            "(torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True))) into a network converted in the same "
            "way and not sharded, and its statistics with anywidth.load_statistics_state"
        )


def gathered(item: Any) -> list[Any]:
    """The values of all ranks, in the order of the ranks."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of a small tensor over all ranks."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


@contextlib.contextmanager
def stops_together() -> Iterator[Callable[[], bool]]:
    """After Ctrl-C: a function that says whether this rank was interrupted since it was last asked.

    A KeyboardInterrupt in the middle of an exchange would leave the other ranks waiting, or give
    them the answer to another question. In a single process nothing is changed.
    """
    arrived = threading.Event()

    def asked() -> bool:
        found = arrived.is_set()
        arrived.clear()
        return found

    if world_size() == 1 or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    # A signal that is ignored, or ends the process at once, keeps its effect.
    caught = [one for one in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(one))]
    before = {one: signal.signal(one, lambda number, frame: arrived.set()) for one in caught}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
