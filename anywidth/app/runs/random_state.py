"""The state of all random generators, kept in checkpoints so that a run resumes exactly."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anywidth.app.runs.nested_state import flatten_state, unflatten_state


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
