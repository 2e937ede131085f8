"""Check the contents of a graph before onnxruntime reads it.

An ONNX file can name other files with weights, and operators of other libraries. A bundle needs
neither, so every field of the graph is read, and anything that is not known to be harmless is
refused. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from anywidth_runtime.errors import BundleError

LOCATION = b"weights"
"""The file that a graph names for its weights; the runtime passes them instead."""

_DEEPEST = 16
_TEXT = "text"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_REAL = {1: "float32", 10: "float16", 11: "float64"}
_WHOLE = {2: "uint8", 3: "int8", 5: "int16", 6: "int32", 7: "int64", 9: "bool"}
_DTYPES = {**_REAL, **_WHOLE}

Field = tuple[int, int | bytes]


@dataclass(frozen=True)
class Placeholder:
    """A weight that the graph expects from outside."""

    dtype: str
    shape: tuple[int, ...]


def read_placeholders(graph: bytes) -> dict[str, Placeholder]:
    """The weights that a graph expects; raises `BundleError` if it asks for anything else."""
    known = {1: "", 2: _TEXT, 3: _TEXT, 4: _TEXT, 5: "", 6: _TEXT, 7: "graph", 8: "", 14: ""}
    graphs = [_bytes(value) for number, value in _known(graph, known) if number == 7]
    if len(graphs) != 1:
        raise BundleError(f"a file of {len(graphs)} graphs; expected one")
    return _read_graph(graphs[0], 0)


def _read_graph(data: bytes, depth: int) -> dict[str, Placeholder]:
    if depth > _DEEPEST:
        raise BundleError(f"graphs inside graphs, more than {_DEEPEST} deep")
    found: dict[str, Placeholder] = {}
    known = {1: "node", 2: _TEXT, 5: "initializer", 10: _TEXT, 11: "", 12: "", 13: "", 16: ""}
    for number, value in _known(data, known):
        if known[number] == "node":
            _check_node(_bytes(value), depth)
        elif known[number] == "initializer":
            name, placeholder = _read_tensor(_bytes(value), is_outermost=depth == 0)
            if name in found:
                raise BundleError(f"two weights named {name[:60]!r}")
            if placeholder is not None:
                found[name] = placeholder
    return found


def _check_node(data: bytes, depth: int) -> None:
    known = {**dict.fromkeys((1, 2, 3, 4, 6, 7), _TEXT), 5: "attribute", 9: ""}
    for number, value in _known(data, known):
        if number == 7 and value not in (b"", b"ai.onnx"):
            raise BundleError(
                f"an operator of {_text(value)[:60]!r}; expected only operators of ONNX"
            )
        if number == 5:
            _check_attribute(_bytes(value), depth)


def _check_attribute(data: bytes, depth: int) -> None:
    known = {1: _TEXT, 13: _TEXT, **dict.fromkeys((2, 3, 4, 7, 8, 9, 20), "")}
    known |= {5: "tensor", 10: "tensor", 6: "graph", 11: "graph"}
    for number, value in _known(data, known):
        if known[number] == "tensor":
            _read_tensor(_bytes(value), is_outermost=False)
        elif known[number] == "graph":
            _read_graph(_bytes(value), depth + 1)


def _read_tensor(data: bytes, is_outermost: bool) -> tuple[str, Placeholder | None]:
    name, code, is_external, locations = "", 0, False, 0
    shape: list[int] = []
    known = {**dict.fromkeys(range(1, 17), ""), 8: _TEXT, 12: _TEXT}
    for number, value in _known(data, known):
        if number == 1:
            shape += [value] if isinstance(value, int) else list(_varints(value))
        elif number == 2 and isinstance(value, int):
            code = value
        elif number == 8:
            name = _text(value)
        elif number == 13:
            _check_location(_bytes(value))
            locations += 1
        elif number == 14:
            is_external = is_external or value != 0
    if not is_external and not locations:
        return name, None
    if not is_outermost or not is_external or locations != 1 or code not in _DTYPES:
        raise BundleError(f"external weights where none are allowed ({name[:60]!r})")
    if any(size >= 2**31 for size in shape):
        raise BundleError(f"a weight {name[:60]!r} of shape {shape[:8]}")
    return name, Placeholder(_DTYPES[code], tuple(shape))


def _check_location(data: bytes) -> None:
    entry = dict(_known(data, {1: "", 2: ""}))
    if entry != {1: b"location", 2: LOCATION}:
        named = _text(entry.get(2, b""))
        raise BundleError(f"a graph that reads another file ({named[:60]!r})")


def _known(data: bytes, known: dict[int, str]) -> Iterator[Field]:
    for number, value in _fields(data):
        if number not in known:
            raise BundleError(f"a graph with a part that a bundle never has (field {number})")
        if known[number] == _TEXT:
            _text(value)
        yield number, value


def _fields(data: bytes) -> Iterator[Field]:
    """The fields of a protobuf message, as (number, value)."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield number, value
            continue
        if kind == _BYTES:
            length, place = _varint(data, place)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise BundleError("a graph that is not ONNX")
        if place + length > len(data):
            raise BundleError("a graph that is not ONNX, or cut off")
        yield number, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64 and place < len(data):
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
    raise BundleError("a graph that is not ONNX, or cut off")


def _varints(data: bytes) -> Iterator[int]:
    place = 0
    while place < len(data):
        value, place = _varint(data, place)
        yield value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise BundleError("a graph that is not ONNX")
    return value


def _text(value: int | bytes) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError as error:
        raise BundleError("a graph with a name that is not UTF-8") from error
