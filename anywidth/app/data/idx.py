"""The IDX file format of MNIST and Fashion-MNIST, plain or compressed."""

import gzip
import lzma
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from anywidth.errors import AnywidthError
from anywidth.files import read_bytes

SUFFIXES = ("", ".gz", ".xz")
UNSIGNED_BYTE = 0x08


def find_idx(folder: Path, name: str) -> Path | None:
    """Return the file of that name, plain or compressed, or None."""
    candidates = (folder / f"{name}{suffix}" for suffix in SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an IDX file of unsigned bytes into a uint8 tensor with ``dimensions`` axes."""
    data = _decompress(path)
    header_size = 4 + 4 * dimensions
    expected_magic = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    if data[:4] != expected_magic or len(data) < header_size:
        raise AnywidthError(
            f"{path} starts with {data[:4].hex() or 'nothing'}: expected {expected_magic.hex()}, "
            f"an IDX file of bytes with {dimensions} dimensions; download the file again"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header_size])
    expected_size = header_size + math.prod(shape)
    if len(data) != expected_size:
        raise AnywidthError(
            f"{path} has {len(data)} bytes (decompressed): expected {expected_size} for the "
            f"shape {shape} in its header; download the file again"
        )
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8, offset=header_size).view(shape)


def _decompress(path: Path) -> bytearray:
    raw = read_bytes(path)
    try:
        if path.suffix == ".gz":
            return bytearray(gzip.decompress(raw))
        if path.suffix == ".xz":
            return bytearray(lzma.decompress(raw))
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise AnywidthError(
            f"{path} ({len(raw)} bytes) does not decompress ({error}): expected a complete "
            f"{path.suffix} file; download it again"
        ) from error
    return bytearray(raw)
