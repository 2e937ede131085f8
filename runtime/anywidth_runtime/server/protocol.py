"""Requests of the Open Inference Protocol, version 2.

A request is JSON. With the header `Inference-Header-Content-Length` it is that many bytes of JSON,
followed by the tensors that have a `binary_data_size`, one after the other.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anywidth_runtime.errors import RequestError

# Type names of the protocol.
TO_NUMPY = {
    "BOOL": "bool",
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
FROM_NUMPY = {numpy_name: name for name, numpy_name in TO_NUMPY.items()}

LENGTH_BYTES = 4
"""Each element of a BYTES tensor begins with its length."""

_PARAMETERS = ("width", "deadline_ms", "binary_data_output")
_MOST_AXES = 8


@dataclass(frozen=True)
class Wanted:
    """An output that a request asks for.

    Args:
        name: its name in the network.
        is_binary: append its bytes to the answer instead of writing numbers.
        classes: return this many of the largest values with the names of their classes instead.
        encoding: "png" returns each image of the output as the bytes of a PNG file.
    """

    name: str
    is_binary: bool = False
    classes: int = 0
    encoding: str = ""


@dataclass(frozen=True)
class InferenceRequest:
    """A request.

    Args:
        tensors: input name → array.
        files: input name → list of image files, one per image.
        outputs: the outputs to return; empty for all.
        width: the width to run at.
        deadline_ms: when its answer is due.
        id: returned with the answer.
        is_binary: whether outputs that it does not list are returned as bytes.
    """

    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    files: Mapping[str, list[bytes]] = field(default_factory=dict)
    outputs: tuple[Wanted, ...] = ()
    width: float | str | None = None
    deadline_ms: float | None = None
    id: str = ""
    is_binary: bool = False


def read_request(body: bytes, json_length: int | None) -> InferenceRequest:
    """Read the body of `/infer`; raises `RequestError` if it is invalid.

    `json_length` is the header `Inference-Header-Content-Length`, if there is one.
    """
    if json_length is not None and not 0 <= json_length <= len(body):
        raise RequestError(
            f"Inference-Header-Content-Length is {json_length} and the body has {len(body)} bytes"
        )
    text = body if json_length is None else body[:json_length]
    data = _mapping(_json(text), "the request")
    if unknown := sorted(set(data) - {"id", "inputs", "outputs", "parameters"}):
        raise RequestError(f"unknown fields {unknown}: expected id, inputs, outputs, parameters")
    parameters = read_parameters(_mapping(data.get("parameters", {}), "parameters"))
    is_binary = _flag(parameters, "binary_data_output")
    inputs = data.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise RequestError("no inputs: expected a list of tensors under 'inputs'")
    rest = memoryview(body)[len(text) :]
    tensors: dict[str, np.ndarray] = {}
    files: dict[str, list[bytes]] = {}
    for one in inputs:
        name, value, rest = _read_input(_mapping(one, "an input"), rest)
        if name in tensors or name in files:
            raise RequestError(f"two inputs named {name!r}")
        if isinstance(value, list):
            files[name] = value
        else:
            tensors[name] = value
    if len(rest):
        raise RequestError(f"{len(rest)} bytes are left over: a binary_data_size is too small")
    return InferenceRequest(
        tensors,
        files,
        tuple(_read_wanted(one, is_binary) for one in _list(data.get("outputs", []), "outputs")),
        parameters.get("width"),
        parameters.get("deadline_ms"),
        str(data.get("id", "")),
        is_binary,
    )


def read_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the parameters of a request; those of a query string are text."""
    if unknown := sorted(set(given) - set(_PARAMETERS)):
        raise RequestError(f"unknown parameters {unknown}: expected {', '.join(_PARAMETERS)}")
    found: dict[str, Any] = dict(given)
    if "deadline_ms" in found:
        found["deadline_ms"] = _milliseconds(found["deadline_ms"])
    if "width" in found:
        found["width"] = _width(found["width"])
    return found


def _width(value: Any) -> float | str:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise RequestError(f"width {value!r}: expected a number, or a configuration's name")
    try:
        return float(value)
    except ValueError:
        return str(value)


def _milliseconds(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise RequestError(f"deadline_ms {value!r}: expected milliseconds above 0")
    return number


def _read_input(
    data: Mapping[str, Any], rest: memoryview
) -> tuple[str, np.ndarray | list[bytes], memoryview]:
    """The name and value of one input, and the remaining bytes."""
    name, datatype = data.get("name"), data.get("datatype")
    if not isinstance(name, str):
        raise RequestError(f"an input named {name!r}: expected a name")
    shape = _read_shape(data.get("shape"), name)
    parameters = _mapping(data.get("parameters", {}), f"parameters of {name!r}")
    size = parameters.get("binary_data_size")
    raw: memoryview | None = None
    if size is not None:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(rest):
            raise RequestError(
                f"binary_data_size of {name!r} is {size!r} and {len(rest)} bytes are left"
            )
        raw, rest = rest[:size], rest[size:]
    elif "data" not in data:
        raise RequestError(f"{name!r} has neither 'data' nor the parameter 'binary_data_size'")
    if datatype == "BYTES":
        found = _split_bytes(raw, name) if raw is not None else _decode_texts(data["data"], name)
        if len(found) != math.prod(shape):
            raise RequestError(f"{name!r} has {len(found)} elements; its shape is {list(shape)}")
        return name, found, rest
    if not isinstance(datatype, str) or datatype not in TO_NUMPY:
        raise RequestError(
            f"{name!r} has datatype {datatype!r}: expected one of {', '.join(TO_NUMPY)}, BYTES"
        )
    kind = np.dtype(TO_NUMPY[datatype])
    array = (
        _from_bytes(raw, kind, name) if raw is not None else _from_json(data["data"], kind, name)
    )
    if array.size != math.prod(shape):
        raise RequestError(f"{name!r} has {array.size} numbers; its shape is {list(shape)}")
    return name, array.reshape(shape), rest


def _read_shape(shape: Any, name: str) -> tuple[int, ...]:
    sizes = _list(shape, f"shape of {name!r}")
    if len(sizes) > _MOST_AXES or not all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**31 for size in sizes
    ):
        raise RequestError(f"shape of {name!r} is {sizes}: expected whole numbers")
    return tuple(sizes)


def _from_bytes(raw: memoryview, kind: np.dtype, name: str) -> np.ndarray:
    if len(raw) % kind.itemsize:
        raise RequestError(f"{name!r} has {len(raw)} bytes: no multiple of {kind.itemsize}")
    return np.frombuffer(raw, kind.newbyteorder("<")).astype(kind, copy=False)


def _from_json(data: Any, kind: np.dtype, name: str) -> np.ndarray:
    try:
        array = np.asarray(data)
        if array.dtype.kind not in "biuf":
            raise TypeError
        with np.errstate(over="ignore"):
            converted = array.astype(kind)
        # Numbers beyond a float's range would become infinite.
        is_kept = (
            np.array_equal(np.isfinite(converted), np.isfinite(array))
            if kind.kind == "f"
            else np.array_equal(converted, array)
        )
        if not is_kept:
            raise TypeError
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"the data of {name!r} are not all numbers of type {kind}") from error
    return converted.reshape(-1)


def _split_bytes(raw: memoryview, name: str) -> list[bytes]:
    """Elements of a BYTES tensor: each begins with its length."""
    found: list[bytes] = []
    while len(raw):
        length = int.from_bytes(raw[:LENGTH_BYTES], "little")
        if len(raw) < LENGTH_BYTES + length:
            raise RequestError(f"{name!r}: element {len(found)} is longer than the remaining bytes")
        found.append(bytes(raw[LENGTH_BYTES : LENGTH_BYTES + length]))
        raw = raw[LENGTH_BYTES + length :]
    return found


def _decode_texts(data: Any, name: str) -> list[bytes]:
    texts = _list(data, f"data of {name!r}")
    try:
        return [base64.b64decode(text, validate=True) for text in texts]
    except (binascii.Error, TypeError, ValueError) as error:
        raise RequestError(f"the data of {name!r} are not base64") from error


def _read_wanted(one: Any, is_binary: bool) -> Wanted:
    data = _mapping(one, "an output")
    name = data.get("name")
    if not isinstance(name, str):
        raise RequestError(f"an output named {name!r}: expected a name")
    given = _mapping(data.get("parameters", {}), f"parameters of {name!r}")
    classes, encoding = given.get("classification", 0), given.get("encoding", "")
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 0:
        raise RequestError(f"classification {classes!r} of {name!r}: expected a whole number")
    if encoding not in ("", "png"):
        raise RequestError(f"encoding {encoding!r} of {name!r}: expected 'png'")
    asked = _flag(given, "binary_data") if "binary_data" in given else is_binary
    return Wanted(name, asked, classes, encoding)


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}") from error


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{what}: expected an object, got {type(value).__name__}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{what}: expected a list, got {type(value).__name__}")
    return value


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}: expected true or false")
    return value
