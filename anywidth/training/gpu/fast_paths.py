"""How a layer gets a fast path, and how layers pass work on to the next layer.

Neighbouring layers share passes over memory. A layer attaches what it leaves to the next one to the
tensor between them: a norm that is still to be computed, or statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import RECORD
from anywidth.slimming.layers import dress
from anywidth.slimming.record import FastPath, Record, record_of
from anywidth.training.gpu import kernels

DEFERRED = "_deferred_norm"
PARTIAL = "_partial_statistics"


def give(module: nn.Module, forward: Any) -> None:
    """Give a module another forward; `layers.drop_fast_paths` removes it."""
    record = module.__dict__.setdefault(RECORD, Record(type(module)))
    record.fast = FastPath(forward)
    dress(module)


def fast_path(module: nn.Module) -> FastPath | None:
    """The fast path of a module; None if it has none."""
    record = record_of(module)
    return None if record is None else record.fast


def has(module: nn.Module, forward: Any) -> bool:
    """Whether a module was given this forward."""
    path = fast_path(module)
    return path is not None and path.forward is forward


def slowly(module: nn.Module, x: Tensor) -> Tensor:
    """Run the forward of the module's own class."""
    result: Tensor = module.__dict__[RECORD].plain.forward(module, x)
    return result


def leave(tensor: Tensor, name: str, value: Any) -> None:
    """Attach something to a tensor for the layer that reads it next."""
    tensor.__dict__[name] = (value, tensor._version)


def take(tensor: Tensor, name: str) -> Any:
    """What was attached, if the tensor has not changed since."""
    value, version = tensor.__dict__.pop(name, (None, None))
    return value if version == tensor._version else None


@contextlib.contextmanager
def no_norm_lost(model: nn.Module) -> Iterator[None]:
    """Refuse a pass that skips a convolution to which a norm was left: nobody computed the norm."""
    paths = {name: path for name, m in model.named_modules() if (path := fast_path(m)) is not None}
    for path in paths.values():
        path.awaits = False  # after a recomputation that stopped early
    yield
    lost = next((name for name, path in paths.items() if path.awaits and not path.has_taken), None)
    if lost is not None:
        raise AnywidthError(
            f"this pass did not run {lost!r}, which computes the batch norm before it: the network "
            "skips a layer that it did not skip when it was traced. Train it with "
            "SandwichStep(..., kernels=False)"
        )


def reach(x: Tensor) -> bool:
    """Whether kernels can be used on a tensor now."""
    return not is_traced() and x.dim() == 4 and kernels.reach(x)


def is_traced() -> bool:
    """`torch.compile`, `torch.export` and `torch.func` get the layers as they were."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def are_watched(*modules: nn.Module) -> bool:
    """Whether there are hooks, which may replace a tensor or read it."""
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in modules
    )
