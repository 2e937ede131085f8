"""The state of optimizers and random generators, as tensors for one file and JSON for another."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anywidth.errors import AnywidthError


def flatten_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Split a nested state such as `optimizer.state_dict()` into tensors and JSON data.

    `unflatten_state` restores numbers, text, None, lists, tuples, dicts and tensors exactly,
    including the types of keys and the memory layout of tensors (an optimizer is slower if a
    momentum and its parameter have different layouts).
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _flatten(state, "", tensors)


def unflatten_state(tensors: Mapping[str, Tensor], structure: Any) -> Any:
    """The state that was given to `flatten_state`."""
    if isinstance(structure, list):
        return [unflatten_state(tensors, item) for item in structure]
    if not isinstance(structure, dict):
        return structure
    try:
        if "dict" in structure:
            return {key: unflatten_state(tensors, value) for key, value in structure["dict"]}
        if "tuple" in structure:
            return tuple(unflatten_state(tensors, item) for item in structure["tuple"])
        tensor = tensors[structure["tensor"]]
        if "stride" not in structure:
            return tensor
        laid_out = torch.empty_strided(tensor.shape, structure["stride"], dtype=tensor.dtype)
        return laid_out.copy_(tensor)
    except AnywidthError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise AnywidthError(f"the state is damaged ({type(error).__name__}: {error})") from error


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON data in which an object is always one of {"dict"}, {"tuple"} or {"tensor"}."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        name = path
        while name in tensors:  # the keys "a.b" and "a" → "b" give the same name
            name += "'"
        tensors[name] = value
        stride = list(value.stride())
        if value.is_contiguous() or list(torch.empty_like(value, device="meta").stride()) != stride:
            return {"tensor": name}
        return {"tensor": name, "stride": stride}
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        entries = []
        for key, item in value.items():
            if type(key) not in (bool, int, float, str):
                raise AnywidthError(f"the state's key {key!r} in {path!r} must be text or a number")
            entries.append([key, _flatten(item, f"{prefix}{key}", tensors)])
        return {"dict": entries}
    if type(value) in (list, tuple):
        items = [_flatten(item, f"{prefix}{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise AnywidthError(
        f"the state's {path!r} is a {type(value).__name__}; it can hold tensors, numbers, text, "
        "None, lists, tuples and dicts"
    )


def capture_random_state() -> tuple[dict[str, Tensor], Any]:
    """The state of every random generator in use (torch, CUDA, Python, NumPy), flattened."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words), gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        import numpy

        legacy = numpy.random.get_state(legacy=False)
        key = torch.tensor(legacy["state"]["key"].tolist())
        state["numpy"] = {**legacy, "state": {"key": key, "pos": int(legacy["state"]["pos"])}}
    return flatten_state(state)


def restore_random_state(tensors: Mapping[str, Tensor], structure: Any) -> None:
    """Restore the generators to the state of `capture_random_state`."""
    state = unflatten_state(tensors, structure)
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        for device, value in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(value, device)
    if "numpy" in state:
        import numpy

        inner = state["numpy"]["state"]
        key = numpy.array(inner["key"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state({**state["numpy"], "state": {**inner, "key": key}})
