"""The description inside a bundle: inputs, outputs, widths and their costs."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anywidth_runtime.errors import BundleError

_REAL = ("float16", "float32", "float64")
_WHOLE = ("bool", "uint8", *(f"int{bits}" for bits in (8, 16, 32, 64)))
_MOST_WIDTHS = 10_000
_MOST_VALUES = 2**27

Width = float | str
"""A fraction of the full width, or the name of a nonuniform configuration."""


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of the network.

    Args:
        name: its name in the file.
        dtype: numpy's name, such as "float32".
        shape: a number per axis, or a name for an axis whose size may differ between calls.
        example: the shape that latency is measured with; empty for an output.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    example: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """One width of the table.

    Args:
        width: the fraction of the full width, or the name of a nonuniform configuration.
        macs: multiply-adds of one example.
        parameters: number of parameters at this width.
        metrics: name → value measured at this width.
        accuracy: the main metric, larger is better; None if it was not measured.
        latency_ms: median milliseconds of one call; None if it was not measured.
    """

    width: Width
    macs: int
    parameters: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    accuracy: float | None = None
    latency_ms: float | None = None


@dataclass(frozen=True)
class Contents:
    """The text part of a bundle, checked.

    `rows` go from the narrowest to the widest width; `variants[i]` is the graph of row i. `machine`
    is the machine on which the latency in the rows was measured.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    rows: tuple[Row, ...]
    variants: tuple[int, ...]
    task: str | None
    takes: str
    facts: Mapping[str, str]
    classes: tuple[str, ...] | None
    accuracy_name: str | None
    machine: Mapping[str, str]


def read_contents(text: str) -> Contents:
    """Check the description of a bundle; raises a `BundleError` that gives only the reason."""
    try:
        about = json.loads(text)
        inputs = tuple(_tensor_info(one) for one in about["inputs"])
        outputs = tuple(_tensor_info(one) for one in about["outputs"])
        entries = list(about["widths"])
        rows = tuple(_row(entry) for entry in entries)
        variants = tuple(_whole(entry["variant"]) for entry in entries)
        contents = Contents(
            inputs,
            outputs,
            rows,
            variants,
            None if about["task"] is None else str(about["task"]),
            str(about["takes"]),
            {str(name): str(value) for name, value in about["facts"].items()},
            None if about["classes"] is None else tuple(map(str, about["classes"])),
            None if about["accuracy_name"] is None else str(about["accuracy_name"]),
            {str(name): str(value) for name, value in about["machine"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise BundleError(f"its description cannot be read ({reason})") from error
    _check_names(contents)
    return contents


def _check_names(contents: Contents) -> None:
    rows = contents.rows
    if not contents.inputs or not contents.outputs or not rows or len(rows) > _MOST_WIDTHS:
        raise BundleError(
            f"it describes {len(contents.inputs)} inputs, {len(contents.outputs)} outputs and "
            f"{len(rows)} widths; expected at least one of each"
        )
    named: dict[str, list[Width]] = {
        "input": [one.name for one in contents.inputs],
        "output": [one.name for one in contents.outputs],
        "width": [row.width for row in rows],
    }
    for kind, names in named.items():
        for name, count in Counter(names).items():
            if count > 1:
                raise BundleError(f"it has the {kind} {str(name)[:40]} twice")
    if any(a.macs > b.macs for a, b in itertools.pairwise(rows)):
        raise BundleError("its widths are not sorted by cost")


def _tensor_info(data: Any) -> TensorInfo:
    name, dtype = data["name"], data["dtype"]
    if not isinstance(name, str) or dtype not in (*_REAL, *_WHOLE):
        raise ValueError(f"an input or output {str(name)[:40]!r} of type {str(dtype)[:20]!r}")
    shape = tuple(axis if isinstance(axis, str) else _whole(axis) for axis in data["shape"])
    example = tuple(_whole(size) for size in data["example"])
    if example and (len(example) != len(shape) or not fits(example, shape)):
        raise ValueError(f"the example {example} of {name!r} does not fit its shape {shape}")
    if math.prod(example) > _MOST_VALUES:
        raise ValueError(f"the example of {name!r} has shape {example}")
    return TensorInfo(name, np.dtype(dtype).name, shape, example)


def fits(sizes: tuple[int, ...], shape: tuple[int | str, ...]) -> bool:
    """Whether the sizes of an array fit a shape; named axes may have any size."""
    return len(sizes) == len(shape) and all(
        size == axis or isinstance(axis, str) for size, axis in zip(sizes, shape, strict=True)
    )


def _row(data: Any) -> Row:
    width = data["width"]
    if not isinstance(width, str):
        width = _number(width)
        if not 0 < width <= 1:
            raise ValueError(f"a width of {width}")
    latency = None if data["latency_ms"] is None else _number(data["latency_ms"])
    if latency is not None and latency <= 0:
        raise ValueError(f"a latency of {latency} ms")
    return Row(
        width,
        _whole(data["macs"]),
        _whole(data["parameters"]),
        {str(name): float(value) for name, value in data["metrics"].items()},
        None if data["accuracy"] is None else _number(data["accuracy"]),
        latency,
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} where a number was expected")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:40]!r} where a whole number was expected")
    return value
