"""Requests and answers of the Open Inference Protocol, version 2.

A request is JSON. With the header `Inference-Header-Content-Length` it is that many bytes of JSON,
followed by the tensors that have a `binary_data_size`, one after the other.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
)

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


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


def _read_width(value: Any) -> float | str:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("expected a number, or a configuration's name")
    try:
        return float(value)
    except ValueError:
        return str(value)


def _read_milliseconds(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError("expected milliseconds above 0")
    return number


class Parameters(_Strict, extra="forbid"):
    """The parameters of a request; those of a query string are text."""

    width: Annotated[float | str | None, PlainValidator(_read_width)] = None
    deadline_ms: Annotated[float | None, PlainValidator(_read_milliseconds)] = None
    binary_data_output: bool = False


@dataclass(frozen=True)
class InferenceRequest:
    """A request.

    Args:
        tensors: input name → array.
        files: input name → list of image files, one per image.
        outputs: the outputs to return; empty for all.
        parameters: the width to run at, when the answer is due, and whether outputs that are not
            listed are returned as bytes.
        id: returned with the answer.
    """

    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    files: Mapping[str, list[bytes]] = field(default_factory=dict)
    outputs: tuple[Wanted, ...] = ()
    parameters: Parameters = field(default_factory=Parameters)
    id: str = ""


class _InputParameters(_Strict):
    binary_data_size: Annotated[int, Field(ge=0)] | None = None


class _Input(_Strict):
    name: str
    datatype: Literal[*TO_NUMPY, "BYTES"]  # type: ignore[valid-type]
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(max_length=_MOST_AXES)
    data: Any = None
    parameters: _InputParameters = _InputParameters()


class _OutputParameters(_Strict):
    binary_data: bool | None = None
    classification: Annotated[int, Field(ge=0)] = 0
    encoding: Literal["", "png"] = ""


class _Output(_Strict):
    name: str
    parameters: _OutputParameters = _OutputParameters()


class _Request(_Strict, extra="forbid"):
    id: Annotated[str, BeforeValidator(str)] = ""
    inputs: list[_Input] = Field(min_length=1)
    outputs: list[_Output] = []
    parameters: Parameters = Parameters()


def read_request(body: bytes, json_length: int | None) -> InferenceRequest:
    """Read the body of `/infer`; raises `RequestError` if it is invalid.

    `json_length` is the header `Inference-Header-Content-Length`, if there is one.
    """
    if json_length is not None and not 0 <= json_length <= len(body):
        raise RequestError(
            f"Inference-Header-Content-Length is {json_length} and the body has {len(body)} bytes"
        )
    text = body if json_length is None else body[:json_length]
    try:
        asked = _Request.model_validate_json(text)
    except ValidationError as error:
        raise _refusal(error) from None
    rest = memoryview(body)[len(text) :]
    tensors: dict[str, np.ndarray] = {}
    files: dict[str, list[bytes]] = {}
    for one in asked.inputs:
        if one.name in tensors or one.name in files:
            raise RequestError(f"two inputs named {one.name!r}")
        value, rest = _read_input(one, rest)
        if isinstance(value, list):
            files[one.name] = value
        else:
            tensors[one.name] = value
    if len(rest):
        raise RequestError(f"{len(rest)} bytes are left over: a binary_data_size is too small")
    is_binary = asked.parameters.binary_data_output
    outputs = tuple(_wanted(one, is_binary) for one in asked.outputs)
    return InferenceRequest(tensors, files, outputs, asked.parameters, asked.id)


def read_parameters(given: Mapping[str, Any]) -> Parameters:
    try:
        return Parameters.model_validate(dict(given))
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "the request"
    said = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{where}: {said}, got {str(first['input'])[:60]!r}")


def _wanted(one: _Output, is_binary: bool) -> Wanted:
    asked = one.parameters
    own = is_binary if asked.binary_data is None else asked.binary_data
    return Wanted(one.name, own, asked.classification, asked.encoding)


def _read_input(one: _Input, rest: memoryview) -> tuple[np.ndarray | list[bytes], memoryview]:
    """The value of one input, and the remaining bytes."""
    name, count, size = one.name, math.prod(one.shape), one.parameters.binary_data_size
    raw: memoryview | None = None
    if size is not None:
        if size > len(rest):
            raise RequestError(
                f"binary_data_size of {name!r} is {size!r} and {len(rest)} bytes are left"
            )
        raw, rest = rest[:size], rest[size:]
    elif one.data is None:
        raise RequestError(f"{name!r} has neither 'data' nor the parameter 'binary_data_size'")
    if one.datatype == "BYTES":
        found = _split_bytes(raw, name) if raw is not None else _decode_texts(one.data, name)
        if len(found) != count:
            raise RequestError(f"{name!r} has {len(found)} elements; its shape is {one.shape}")
        return found, rest
    kind = np.dtype(TO_NUMPY[one.datatype])
    array = _from_bytes(raw, kind, name) if raw is not None else _from_json(one.data, kind, name)
    if array.size != count:
        raise RequestError(f"{name!r} has {array.size} numbers; its shape is {one.shape}")
    return array.reshape(one.shape), rest


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
    try:
        if not isinstance(data, list):
            raise TypeError
        return [base64.b64decode(text, validate=True) for text in data]
    except (TypeError, ValueError) as error:
        raise RequestError(f"the data of {name!r} are not base64") from error


# ---- answers -------------------------------------------------------------------------------------


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
            texts = map(base64.b64encode, value.items) if wanted.encoding else value.items
            entry["data"] = [one.decode() for one in texts]
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
