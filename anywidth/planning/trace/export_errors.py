"""The error for a network that cannot be exported: the line of code, the shapes, and a cure."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anywidth.errors import AnywidthError

_OURS = Path(__file__).parents[2]
_TORCH = Path(torch.__file__).parent
_MOST = 240  # characters of torch's own words
_VALUES = "A forward must not branch on the values of tensors: use torch.where, or masks"
# A part of the file name, function or message of an error, and the cure.
_CURES = (
    (
        "got FakeTensor",
        "Packing needs the lengths' values: run the recurrent layer on the padded sequence, or "
        "pass the lengths as a list of numbers",
    ),
    (
        "expert_hit",
        "Experts are looked up by values: choose another way with "
        "model.config._experts_implementation = 'grouped_mm' (or 'batched_mm')",
    ),
    (
        "'NoneType' object",
        "If model(*example_input) runs, its code takes another path while it is exported: give the "
        "argument that it makes itself otherwise, such as attention_mask",
    ),
    ("Cache", "Leave the cache out: pass use_cache=False, or set model.config.use_cache = False"),
)


def export_failure(
    model: nn.Module, inputs: tuple[Any, ...], error: BaseException, cure: str | None = None
) -> AnywidthError:
    frames = traceback.extract_tb(error.__traceback__)
    said = (str(error).strip().splitlines() or ["no message"])[0][:_MOST].rstrip(". ")
    place = _own_line(frames)
    where = f" at {place}" if place else ""
    return AnywidthError(
        f"{type(model).__name__} could not be exported with the example input "
        f"{[_shape(x) for x in inputs]}: {type(error).__name__}{where}: {said}. "
        f"{cure or _cure(error)}"
    )


def _own_line(frames: traceback.StackSummary) -> str:
    """The last line of code that is neither torch's nor this library's."""
    for frame in reversed(frames):
        path = Path(frame.filename)
        is_code = path.is_absolute() and not {_OURS, _TORCH} & set(path.parents)
        if is_code and "/contextlib.py" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"
    return ""


def known_cure(error: BaseException) -> str | None:
    """What helps against an error that many networks show; None if it is another."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = [f"{frame.filename} {frame.name} {frame.line}" for frame in frames] + [str(error)]
    cures = (cure for sign, cure in _CURES if any(sign in text for text in shown))
    return next(cures, None)


def _cure(error: BaseException) -> str:
    known = known_cure(error)
    if known is not None:
        return known
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        return _VALUES
    return (
        "Check that model(*example_input) runs, with a batch of at least 2, and that "
        "forward() does not branch on the values of tensors"
    )


def _shape(value: Any) -> Any:
    """An argument with shapes in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return [_shape(item) for item in value]
    if isinstance(value, dict):
        return {name: _shape(item) for name, item in value.items()}
    is_short = value is None or isinstance(value, bool | int | float | str)
    return value if is_short else type(value).__name__
