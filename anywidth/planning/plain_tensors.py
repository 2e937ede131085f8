"""Tables that a module keeps as plain attributes, not as buffers: VideoMAE's positions, say.

A plan treats them as buffers that are not saved, and a converted network keeps them so. The network
that is planned, and extracted ones, have plain attributes as before.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from anywidth.planning.cuts import RECORD
from anywidth.planning.held_numbers import functions_of


@contextlib.contextmanager
def tables_as_buffers(*models: nn.Module) -> Iterator[None]:
    """Register tables as buffers inside a `with` block."""
    registered = [(model, register_tables(model, list(_plain_tables(model)))) for model in models]
    try:
        yield
    finally:
        for model, names in registered:
            release_tables(model, names)


def register_tables(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Make buffers of the named tensors that are plain attributes; returns their names."""
    found = []
    modules = dict(model.named_modules())
    for name in names:
        path, _, key = name.rpartition(".")
        module = modules.get(path)
        if module is not None and isinstance(vars(module).get(key), Tensor):
            module._buffers[key] = module.__dict__.pop(key)
            module._non_persistent_buffers_set.add(key)
            found.append(name)
    return found


def release_tables(model: nn.Module, names: Iterable[str]) -> None:
    """Make plain attributes of buffers again."""
    for name in names:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        if key in module._buffers:
            vars(module)[key] = module._buffers.pop(key)
            module._non_persistent_buffers_set.discard(key)


def _plain_tables(model: nn.Module) -> Iterator[str]:
    """Plain attributes that hold more than one number, and that no module's code assigns."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    assigned = frozenset[str]().union(*map(_assigned_in_code, kinds))
    for path, module in model.named_modules():
        kind: Any = type(module)
        is_other = kind.__module__.startswith("torch.") or RECORD in vars(module)
        if is_other or module._forward_pre_hooks:
            continue
        for key, value in vars(module).items():
            is_table = isinstance(value, Tensor) and value.is_floating_point() and value.is_leaf
            if is_table and value.numel() > 1 and key not in assigned:
                yield f"{path}.{key}".lstrip(".")


@functools.lru_cache(maxsize=1024)
def _assigned_in_code(kind: Any) -> frozenset[str]:
    """The attributes that the code of a class assigns after a module is made."""
    steps = (step for function in functions_of(kind) for step in dis.get_instructions(function))
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")
