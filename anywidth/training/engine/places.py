"""What a graph finds at fixed places in memory, and what it was captured with.

A replay runs no Python. If a parameter or buffer is elsewhere, a mode has changed or a layer has
another hook, the graphs must be captured again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

State = list[Any]


class Places:
    """The parameters, buffers, modes and hooks of a network, watched for changes."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.modules = list(model.modules())
        self.known: State = []

    def have_changed(self) -> bool:
        """Whether anything has changed since the last call."""
        before, self.known = self.known, self._now()
        return before != self.known

    def have_hooks(self) -> bool:
        """Whether parameters have hooks. A graph adds up gradients without them."""
        return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters)

    def _now(self) -> State:
        found: State = [(p.data_ptr(), p.requires_grad) for p in self.parameters]
        for module in self.modules:
            found.append(module.training)
            found += [b.data_ptr() for b in module._buffers.values() if b is not None]
            # Each hook has a number of its own.
            found += [*module._forward_hooks, *module._forward_pre_hooks]
            found += [*module._backward_hooks, *module._backward_pre_hooks]
        return found


class AssignedBufferError(Exception):
    """A forward pass made a new tensor of a buffer; replays would always start from the old one."""


@contextlib.contextmanager
def assigning_no_buffers(model: nn.Module) -> Iterator[None]:
    """Refuse passes that replace buffers, and put the old buffers back."""
    held = [(path, module, dict(module._buffers)) for path, module in model.named_modules()]
    replaced: list[str] = []
    try:
        yield
    finally:
        for path, module, buffers in held:
            for name, buffer in buffers.items():
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                    replaced.append(f"{path}.{name}".lstrip("."))
    if replaced:
        raise AssignedBufferError(
            f"its forward assigns the buffer {replaced[0]!r}; write into it, as with copy_()"
        )
