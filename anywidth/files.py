"""Files that are complete or absent, and tensors on disk without pickle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from anywidth.errors import AnywidthError
from anywidth.json_values import check_encodable, mapped, text

Content = bytes | Callable[[BinaryIO], None]
"""The bytes of a file, or a function that writes them to an open file."""

# A safetensors file starts with the length of its header, in this many bytes.
_LENGTH_BYTES = 8
_MOST_JSON = 2**28
# The name under which a file keeps its checksum (hexadecimal digits) followed by its metadata.
# It is one name, because safetensors writes several in random order.
_OURS, _DIGITS = "anywidth.metadata", 64


def write_atomically(path: str | Path, content: Content, *, named: Path | None = None) -> None:
    """Write a file so that `path` has the old or the new content, whenever the process dies.

    The content is written to a temporary file in the same folder, forced to the disk, and renamed
    to `path`. `remove_leftovers` removes the temporary files of killed processes. Errors call the
    file `named`, if its folder will be renamed.
    """
    write_together({Path(path): content}, named=named)


def write_together(contents: Mapping[Path, Content], *, named: Path | None = None) -> None:
    """Write files that belong together: all new ones are on the disk before any is replaced."""
    with contextlib.ExitStack() as stack:
        temporaries = {}
        for path, content in contents.items():
            with errors_that_name(named or path):
                temporaries[path] = stack.enter_context(_written_beside(path, content))
        for path, temporary in temporaries.items():
            with errors_that_name(named or path):
                os.replace(temporary, path)
    for folder in {path.parent for path in contents}:
        sync_folder(folder)


@contextlib.contextmanager
def _written_beside(path: Path, content: Content) -> Iterator[Path]:
    """The content on the disk, under a temporary name that is removed afterwards."""
    temporary = temporary_path(path)
    try:
        with open(temporary, "xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        with contextlib.suppress(OSError):  # report the original error
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def errors_that_name(path: Path) -> Iterator[None]:
    """Turn an OSError into an AnywidthError that names `path`, not its temporary file."""
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else Path(str(error.filename))
        is_other_file = named is not None and named != path and not is_leftover(named)
        if error.errno is None or is_other_file:
            raise  # about another file that was read meanwhile
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError):
            folder = path.parent
            is_there = folder.is_dir()
            reason = f"{folder} takes no files" if is_there else f"there is no folder {folder}"
        raise AnywidthError(f"{path}: cannot be written ({reason})") from error


def make_folder(folder: Path) -> None:
    """Make a folder for results, and its parents; refuse one that cannot be written to."""
    check_encodable(str(folder), "the folder of results")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        reason = "it is a file"
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"
    if reason:
        raise AnywidthError(
            f"{folder}: cannot hold results ({reason}); choose another folder with --out"
        )


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, so that a rename survives a power cut."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(path: Path) -> Path:
    """A new hidden name beside `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def is_leftover(path: Path) -> bool:
    """Whether this is a name of `temporary_path`."""
    return path.name.startswith(".") and path.suffix == ".tmp"


def remove_leftovers(folder: Path, of: Collection[str] | None = None) -> None:
    """Remove the temporary files of killed writers; no other writer may be active.

    `of` are the files that were being written; all in the folder if not given.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        written = path.name[1:].removesuffix(".tmp").rpartition(".")[0]
        if is_leftover(path) and (of is None or written in of):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_json(path: Path, data: Mapping[str, Any], *, named: Path | None = None) -> None:
    """Write readable JSON atomically; `named` as in `write_atomically`."""
    try:
        content = json.dumps(data, indent=2)
    except (TypeError, ValueError) as error:
        raise AnywidthError(
            f"{named or path}: {error}; JSON holds text, numbers, booleans, None, lists and dicts "
            "of these"
        ) from error
    write_atomically(path, (content + "\n").encode(), named=named)


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The content of a file of at most `most` bytes; the error names the file and the reason.

    A pipe or a device, such as /dev/zero, is refused, because reading it may never end.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
            raise AnywidthError(f"{path}: cannot be read (it is {kind}, not a file)")
        if most is not None and found.st_size > most:
            raise AnywidthError(
                f"{path}: {found.st_size:,} bytes, but such a file has at most {most:,}"
            )
        return path.read_bytes()
    except OSError as error:
        raise AnywidthError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    content = read_bytes(path, _MOST_JSON)
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AnywidthError(f"{path}: truncated or not JSON ({error})") from error
    if not isinstance(data, dict):
        raise AnywidthError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def save_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as safetensors, atomically.

    Tensors may be on any device and share storage; the file has a full copy for each name.
    """
    write_atomically(path, encode_tensors(tensors, metadata, Path(path)))


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata from a file of `save_tensors`; no code is ever executed.

    The tensors are on the CPU and do not map the file.
    """
    path = Path(path)
    return decode_tensors(read_bytes(path), path)


def encode_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None, path: Path
) -> bytes:
    """The bytes of a safetensors file; `path` is only used in errors."""
    import safetensors.torch  # here, because importing this library needs only torch

    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, given in tensors.items():
        if not isinstance(given, Tensor):
            raise AnywidthError(
                f"{path}: {name!r} is a {type(given).__name__}; expected a tensor "
                "(a nested state has to be flattened first)"
            )
        if given.layout != torch.strided:
            raise AnywidthError(f"{path}: {name!r} is {given.layout}; call .to_dense() first")
        tensor = given.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    about = json.dumps(dict(metadata or {}), sort_keys=True)
    try:
        return safetensors.torch.save(plain, metadata={_OURS: _checksum(plain, about) + about})
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        kinds = sorted({str(tensor.dtype) for tensor in plain.values()})
        raise AnywidthError(
            f"{path}: safetensors cannot hold these tensors ({error}); their types are {kinds}"
        ) from error


def decode_tensors(data: bytes, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata from the bytes of a safetensors file; `path` is only used in errors."""
    if data.startswith((b"PK\x03\x04", b"\x80")) and data[_LENGTH_BYTES:][:1] != b"{":
        raise AnywidthError(
            f"{path}: a file of torch.save (pickle), which can execute code, so it is not read; "
            "convert it with torch.load(..., weights_only=True) and anywidth.files.save_tensors"
        )
    import safetensors.torch

    try:
        # safetensors returns them in random order.
        tensors = dict(sorted(safetensors.torch.load(data).items()))
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise AnywidthError(f"{path}: truncated or not a safetensors file ({error})") from error
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    held = dict(json.loads(data[_LENGTH_BYTES:start]).get("__metadata__") or {})
    if _OURS not in held:  # written by another program
        return tensors, held
    expected, about = held[_OURS][:_DIGITS], held[_OURS][_DIGITS:]
    damage = "its content does not match its checksum"
    if expected == _checksum(tensors, about):
        try:
            return tensors, mapped(text)(json.loads(about), "its metadata")
        except (ValueError, RecursionError) as error:
            damage = str(error)
    raise AnywidthError(f"{path}: damaged, {damage}; restore it from a copy")


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    found = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}, {tensor.dtype}, {tuple(tensor.shape)}:".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
