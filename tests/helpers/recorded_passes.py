"""What CUDA graphs do, on a CPU: the operations of a pass are recorded, then replayed.

As on a GPU, a replay runs no Python of the pass and reads and writes the tensors of the capture,
and capturing leaves no trace in them. So the engine's bookkeeping can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from anywidth.training.engine.capture import CaptureError, CudaCapture, Result


class RecordedPasses(CudaCapture):
    """Takes the place of `CudaCapture`; counts what it captures, or refuses to.

    `freed` counts how often unused memory was freed; `is_short` makes the next capture find none.
    """

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.is_short = False
        self.count = 0
        self.freed = 0

    def reaches(self, tensors: Iterable[Tensor]) -> bool:
        return True

    def start_anew(self) -> None:
        self.has_memory = False

    def run(self, function: Callable[[], Result]) -> Result:
        return function()

    def _free_unused(self) -> None:
        self.freed += 1
        self.is_short = False

    def _captured(self, function: Callable[[], None]) -> Callable[[], None]:
        if self.refuses:
            raise CaptureError("refused")
        if self.is_short:
            raise torch.OutOfMemoryError("no memory")
        self.count += 1
        recorder = _Recorder()
        with recorder:
            function()
        for storage, before in recorder.written.values():
            storage.copy_(before)
        return recorder.replay


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            storage = tensor.untyped_storage()
            self.written.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, *map(_detached, (args, kwargs, result))))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            found = func(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(found), strict=True):
                if old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    names = {
        a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    }
    if func._schema.name.startswith("aten::native_batch_norm"):
        names |= {"running_mean", "running_var"}  # its schema does not say so
    return [tensor for name in names & set(given) for tensor in _tensors(given[name])]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _detached(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)
