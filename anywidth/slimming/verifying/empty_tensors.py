"""Detect tensors without entries, with which some kernels crash the whole process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class EmptyTensors(TorchDispatchMode):
    """Raise before an operation gets a tensor without entries.

    Args:
        allowed: operations that may get one; None allows all, and `seen` collects them.
    """

    def __init__(self, allowed: Iterable[str] | None = None) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self._allowed = None if allowed is None else set(allowed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        empty = [tuple(x.shape) for x in given if x.numel() == 0]
        if empty:
            name = str(func)
            self.seen.add(name)
            if self._allowed is not None and name not in self._allowed:
                raise RuntimeError(f"{name} is given a tensor without entries, {empty[0]}")
        return func(*args, **(kwargs or {}))
