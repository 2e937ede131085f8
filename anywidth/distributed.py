"""Several processes: which one this is, on which device, and one gradient reduction a step."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from anywidth.errors import AnywidthError


def start_processes(device: torch.device) -> None:
    """Joins the group that `torchrun` started; does nothing in a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        # Its functions keep the group that is there when they are first imported as a default.
        # Imported later, by whatever needs it, they would keep ours beyond stop_processes, and
        # gloo's threads, still running while Python ends, now and then abort the process.
        importlib.import_module("torch.distributed.nn.functional")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def stop_processes() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def local_device(name: str) -> torch.device:
    """The device of this process: `auto` takes a GPU if there is one, its own on each rank."""
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise AnywidthError(f"device {name!r}: expected auto, cpu, cuda or cuda:N")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise AnywidthError(f"device {name!r} was asked for, but torch sees no CUDA GPU here")
    device = torch.device(name if ":" in name else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise AnywidthError(
            f"device {name!r}: this machine has {torch.cuda.device_count()} GPUs, numbered from 0"
        )
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """What a report calls the device that numbers were made on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Averages the gradients of all ranks, in one reduction a dtype."""
    if world_size() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        # All ranks visit the same widths, so a parameter takes part on all of them or on none, and
        # one that takes no part must not get a gradient, on which weight decay would act.
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    average_in_place(by_dtype)


@torch.no_grad()
def send_from_first_rank(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Gives all ranks the first one's weights and statistics, as DistributedDataParallel does.

    Gradients are averaged, so ranks that start from other weights would stay apart for ever.
    """
    if world_size() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in [*parameters, *model.buffers()]:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_dtype.values():
        flat = _flatten_dense_tensors(tensors)
        dist.broadcast(flat, src=0)
        for tensor, first in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):
            tensor.copy_(first)


def average_in_place(by_dtype: dict[torch.dtype, list[Tensor]]) -> None:
    for tensors in by_dtype.values():
        flat = _flatten_dense_tensors(tensors)
        dist.all_reduce(flat)
        flat /= world_size()
        for tensor, mean in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):
            tensor.copy_(mean)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of a small tensor over all ranks."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor
