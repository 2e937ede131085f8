"""A bundle on disk: one safetensors file, mapped into memory and checked before it is used."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from anywidth_runtime.contents import Contents, read_contents
from anywidth_runtime.errors import BundleError
from anywidth_runtime.harmless_graphs import read_placeholders
from anywidth_runtime.weight_pieces import Piece, read_pieces

_LENGTH_BYTES = 8
_FORMAT, VERSION = "anywidth.bundle", "1"
_MOST_HEADER = 64 * 2**20
_DTYPES = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}


@dataclass(frozen=True)
class Variant:
    """One graph of a bundle, and how its weights are cut from those of the full width."""

    graph: bytes
    pieces: dict[str, Piece]

    @property
    def weight_count(self) -> int:
        return sum(math.prod(piece.shape) for piece in self.pieces.values())

    @property
    def memory(self) -> int:
        """The bytes of the weights of one session."""
        cut = sum(math.prod(p.shape) * p.weight.dtype.itemsize for p in self.pieces.values())
        return cut + len(self.graph)


@dataclass(frozen=True)
class Bundle:
    """The contents of a file; arrays are views of the mapped file."""

    path: Path
    checksum: str
    contents: Contents
    variants: tuple[Variant, ...]
    opened: os.stat_result

    def weights(self, variant: int) -> dict[str, np.ndarray]:
        """The weights of one graph, cut from those of the full width."""
        self._check_unchanged()
        pieces = self.variants[variant].pieces
        return {name: piece.cut() for name, piece in pieces.items()}

    def _check_unchanged(self) -> None:
        """Refuse a file that was written into: its mapped weights are those of another file.

        A file that was replaced as a whole, or removed, stays mapped as it was.
        """
        try:
            now = os.stat(self.path)
        except OSError:
            return
        is_same_file = os.path.samestat(now, self.opened)
        before = (self.opened.st_size, self.opened.st_mtime_ns)
        if is_same_file and (now.st_size, now.st_mtime_ns) != before:
            raise BundleError(f"{self.path}: was written into after it was opened: open it again")


def read_bundle(path: str | os.PathLike[str], verified: bool = True) -> Bundle:
    """Map a bundle and check all of it; the `BundleError` says in one sentence what is wrong.

    With `verified`, its content is compared with its checksum, which reads all of it once.
    """
    path = Path(path)
    try:
        return _read(path, verified)
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror or error})") from error


def _read(path: Path, verified: bool) -> Bundle:
    if path.exists() and not path.is_file():  # opening a pipe waits until somebody writes to it
        raise BundleError("a folder, a pipe or a device, not a file")
    with open(path, "rb") as file:
        opened = os.fstat(file.fileno())
        if opened.st_size <= _LENGTH_BYTES:
            raise BundleError(f"{opened.st_size} bytes that are not a bundle")
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    header, start = _read_header(data)
    _check_layout(path)
    seal, text = _read_metadata(header.pop("__metadata__", None))
    tensors = {name: _array(name, entry, data[start:]) for name, entry in header.items()}
    if verified and seal != _checksum(tensors, text):
        raise BundleError("damaged: its content does not match its checksum; copy it again")
    contents = read_contents(text)
    weights = {
        name.removeprefix("weight/"): array
        for name, array in tensors.items()
        if name.startswith("weight/")
    }
    count = len(set(contents.variants))
    if set(contents.variants) != set(range(count)) or len(tensors) != len(weights) + 3 * count:
        raise BundleError("its list of widths does not match its graphs")
    variants = [_variant(index, tensors, weights) for index in range(count)]
    _check_order(contents, variants)
    return Bundle(path, seal, contents, tuple(variants), opened)


def encode_bundle(tensors: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> bytes:
    """The bytes of a bundle; the same for the same content."""
    text = json.dumps(about)
    # One entry, because safetensors writes several metadata entries in a random order.
    metadata = {_FORMAT: f"{VERSION} {_checksum(tensors, text)} {text}"}
    return safetensors.numpy.save(dict(tensors), metadata=metadata)


def _read_header(data: memoryview) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if data[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        raise BundleError(f"{len(data)} bytes that are not a bundle")
    if length > _MOST_HEADER:
        raise BundleError(f"a header of {length} bytes; expected at most {_MOST_HEADER}")
    if start > len(data):
        raise BundleError(f"cut off: the file has {len(data)} bytes and its header ends at {start}")
    try:
        header: dict[str, Any] = json.loads(bytes(data[_LENGTH_BYTES:start]))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        expected = start + max(map(int, ends), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise BundleError(f"not a safetensors file ({str(error)[:120]})") from error
    if len(data) != expected:
        kind = "cut off" if len(data) < expected else "something was appended"
        raise BundleError(f"{kind}: {len(data)} bytes are there, expected {expected}")
    return header, start


def _check_layout(path: Path) -> None:
    """Check offsets, shapes and types; safetensors refuses overlaps, gaps and wrong sizes."""
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise BundleError(f"not a safetensors file ({str(error)[:120]})") from error


def _read_metadata(metadata: Any) -> tuple[str, str]:
    """The checksum, and the description as text."""
    kept = metadata.get(_FORMAT) if isinstance(metadata, dict) else None
    if not isinstance(kept, str):
        raise BundleError(
            "a safetensors file, but not a bundle; write one with anywidth.export_bundle"
        )
    version, _, rest = kept.partition(" ")
    if version != VERSION:
        raise BundleError(f"version {version[:20]} of the format; this runtime reads {VERSION}")
    seal, _, text = rest.partition(" ")
    return seal, text


def _checksum(tensors: Mapping[str, np.ndarray], text: str) -> str:
    found = hashlib.sha256(text.encode())
    for name, array in sorted(tensors.items()):
        found.update(f"{name}, {array.dtype}, {array.shape}:".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _array(name: str, entry: dict[str, Any], data: memoryview) -> np.ndarray:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise BundleError(f"{name[:60]!r} is of type {entry['dtype']}, which a bundle never has")
    begin, end = entry["data_offsets"]
    return np.frombuffer(data[begin:end], dtype).reshape(entry["shape"])


def _variant(index: int, tensors: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> Variant:
    parts = [tensors.get(f"{kind}/{index}") for kind in ("graph", "pieces", "scales")]
    dtypes = [None if part is None or part.ndim != 1 else part.dtype.name for part in parts]
    graph, pieces, scales = parts
    if dtypes != ["uint8", "uint8", "float32"] or graph is None or pieces is None or scales is None:
        raise BundleError(f"graph {index} is missing or of the wrong type")
    content = graph.tobytes()
    return Variant(
        content, read_pieces(pieces.tobytes(), read_placeholders(content), weights, scales)
    )


def _check_order(contents: Contents, variants: list[Variant]) -> None:
    """Refuse an impossible table: a wider width has at least as many weights, a graph one cost."""
    pairs = list(zip(contents.rows, contents.variants, strict=True))
    costs = {variant: row.macs for row, variant in pairs}
    if any(row.macs != costs[variant] for row, variant in pairs):
        raise BundleError("its table is wrong: one graph has two costs")
    uniform = sorted(
        (row.width, row.macs, variants[variant].weight_count)
        for row, variant in pairs
        if isinstance(row.width, float)
    )
    for (low, low_macs, few), (high, high_macs, many) in itertools.pairwise(uniform):
        if few > many or low_macs > high_macs:
            raise BundleError(f"its table is wrong: width {low:g} is larger than {high:g}")
