"""Answers of the Open Inference Protocol, version 2."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anywidth_runtime.server.protocol import FROM_NUMPY, LENGTH_BYTES, Wanted


@dataclass(frozen=True)
class Elements:
    """A tensor of bytes, for texts or files."""

    items: list[bytes]
    shape: tuple[int, ...]


Value = np.ndarray | Elements


@dataclass(frozen=True)
class Answer:
    """A body, and the number of its bytes that are JSON; None if all are."""

    body: bytes
    json_length: int | None


def write_answer(
    model: str,
    outputs: list[tuple[Wanted, Value]],
    parameters: Mapping[str, Any],
    id: str = "",
) -> Answer:
    """The body of an answer."""
    described, blobs = [], []
    for wanted, value in outputs:
        entry: dict[str, Any] = {"name": wanted.name}
        if isinstance(value, Elements):
            entry |= {"datatype": "BYTES", "shape": list(value.shape)}
            raw = b"".join(len(one).to_bytes(LENGTH_BYTES, "little") + one for one in value.items)
        else:
            entry |= {"datatype": FROM_NUMPY[value.dtype.name], "shape": list(value.shape)}
            raw = np.ascontiguousarray(value).tobytes() if wanted.is_binary else b""
        if wanted.is_binary:
            entry["parameters"] = {"binary_data_size": len(raw)}
            blobs.append(raw)
        elif isinstance(value, Elements):
            is_file = bool(wanted.encoding)
            entry["data"] = [(b64encode(one) if is_file else one).decode() for one in value.items]
        else:
            entry["data"] = _numbers(value)
        described.append(entry)
    answer: dict[str, Any] = {"model_name": model, "model_version": "1"}
    if id:
        answer["id"] = id
    answer |= {"parameters": dict(parameters), "outputs": described}
    text = json.dumps(answer).encode()
    return Answer(text + b"".join(blobs), len(text) if blobs else None)


def _numbers(value: np.ndarray) -> list[Any]:
    """Write infinity and NaN, which JSON does not have, as null."""
    flat = value.reshape(-1)
    if value.dtype.kind != "f" or np.isfinite(flat).all():
        return flat.tolist()
    return [number if math.isfinite(number) else None for number in flat.tolist()]
