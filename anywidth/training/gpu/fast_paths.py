"""How a layer gets a fast path, and what layers leave for the next one.

Layers that follow each other share their passes over memory. What one leaves travels with the
tensor between them: a norm that is yet to be done, or statistics that were taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from anywidth.planning.cuts import RECORD
from anywidth.slimming.layers import dress
from anywidth.slimming.record import FastPath, Record, record_of
from anywidth.training.gpu import kernels

DEFERRED = "_deferred_norm"
PARTIAL = "_partial_statistics"


def give(module: nn.Module, forward: Any) -> None:
    """Gives a module another forward; `layers.drop_fast_paths` takes it away again."""
    record = module.__dict__.setdefault(RECORD, Record(type(module)))
    record.fast = FastPath(forward)
    dress(module)


def fast_path(module: nn.Module) -> FastPath | None:
    """What a module was given in `give`; None without."""
    record = record_of(module)
    return None if record is None else record.fast


def has(module: nn.Module, forward: Any) -> bool:
    """Whether a module was given this forward."""
    path = fast_path(module)
    return path is not None and path.forward is forward


def slowly(module: nn.Module, x: Tensor) -> Tensor:
    """What the module's own class makes of a tensor."""
    result: Tensor = module.__dict__[RECORD].plain.forward(module, x)
    return result


def leave(tensor: Tensor, name: str, value: Any) -> None:
    """Leaves something for the layer that reads a tensor next."""
    tensor.__dict__[name] = (value, tensor._version)


def take(tensor: Tensor, name: str) -> Any:
    """What was left there, if the tensor still is what it was then."""
    value, version = tensor.__dict__.pop(name, (None, None))
    return value if version == tensor._version else None


def reach(x: Tensor) -> bool:
    """Whether kernels can work on a tensor, here and now."""
    return not is_traced() and x.dim() == 4 and kernels.reach(x)


def is_traced() -> bool:
    """`torch.compile`, `torch.export` and `torch.func` get the layers as they were."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def are_watched(*modules: nn.Module) -> bool:
    """Whether there are hooks, which may hand on another tensor, or want to see this one."""
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in modules
    )
