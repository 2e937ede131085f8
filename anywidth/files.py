"""Files that are either whole or not there, and tensors on disk without pickle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from anywidth.errors import AnywidthError

# The header of a safetensors file starts with its length in this many bytes.
_LENGTH_BYTES = 8
# Under which name a file keeps its checksum, in hexadecimal digits, and after it its metadata.
# One name alone, as safetensors writes several in a random order.
_OURS, _DIGITS = "anywidth.metadata", 64


def write_atomically(
    path: str | Path,
    content: bytes | Callable[[BinaryIO], None],
    *,
    named: Path | None = None,
) -> None:
    """Writes a file so that `path` holds the old content or the new, whenever the process dies.

    The content goes to a temporary file in the same folder, is forced to the disk and then takes
    the place of `path`. What a killed process leaves behind, `remove_leftovers` removes.

    Args:
        path: the file; its folder must exist.
        content: the bytes, or a function that writes them to the open file it is given.
        named: what errors call the file, where its folder will be renamed; `path` if not given.
    """
    path = Path(path)
    with errors_that_name(named or path), _written_beside(path, content) as temporary:
        os.replace(temporary, path)
    sync_folder(path.parent)


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Writes files that belong together: no old one goes before all new ones are on the disk."""
    with contextlib.ExitStack() as stack:
        temporaries = {}
        for path, content in contents.items():
            with errors_that_name(path):
                temporaries[path] = stack.enter_context(_written_beside(path, content))
        for path, temporary in temporaries.items():
            with errors_that_name(path):
                os.replace(temporary, path)
    for folder in {path.parent for path in contents}:
        sync_folder(folder)


@contextlib.contextmanager
def _written_beside(path: Path, content: bytes | Callable[[BinaryIO], None]) -> Iterator[Path]:
    """The content on the disk, under a temporary name that is gone afterwards."""
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
        with contextlib.suppress(OSError):  # the error that led here is the one to tell
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def errors_that_name(path: Path) -> Iterator[None]:
    """What the system refuses becomes an AnywidthError of `path`, not of its temporary name."""
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else Path(str(error.filename))
        is_other_file = named is not None and named != path and not is_leftover(named)
        if error.errno is None or is_other_file:
            raise  # of something that was read meanwhile
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError):
            folder = path.parent
            is_there = folder.is_dir()
            reason = f"{folder} takes no files" if is_there else f"there is no folder {folder}"
        raise AnywidthError(f"{path}: cannot be written ({reason})") from error


def make_folder(folder: Path) -> None:
    """Makes a folder for results, and its parents; refuses one that cannot be written to."""
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
    """Forces a folder's list of names to the disk: a rename may otherwise outlive a power cut."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(path: Path) -> Path:
    """A fresh hidden name beside `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def is_leftover(path: Path) -> bool:
    """Whether the name is one that `temporary_path` gives."""
    return path.name.startswith(".") and path.suffix == ".tmp"


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed writer left in `folder`; no other writer may be at work there."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_leftover(path):
            remove(path)


def remove(path: Path) -> None:
    """Removes a file or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_json(path: Path, data: Mapping[str, Any], *, named: Path | None = None) -> None:
    """Writes JSON atomically, in a form people can read; `named` as in `write_atomically`."""
    try:
        text = json.dumps(data, indent=2)
    except (TypeError, ValueError) as error:
        raise AnywidthError(
            f"{named or path}: {error}; JSON holds text, numbers, booleans, None, lists and dicts "
            "of these"
        ) from error
    write_atomically(path, (text + "\n").encode(), named=named)


def read_bytes(path: Path) -> bytes:
    """The file's content; an AnywidthError names it and the reason where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise AnywidthError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    try:
        data = json.loads(read_bytes(path))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise AnywidthError(f"{path}: truncated or not JSON ({error})") from error
    if not isinstance(data, dict):
        raise AnywidthError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def save_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors as safetensors, atomically.

    Tensors may lie on any device and share storage; each name gets its own full copy in the file.
    """
    write_atomically(path, encode_tensors(tensors, metadata, Path(path)))


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads tensors and metadata that `save_tensors` wrote; no code in the file is ever executed.

    The tensors are on the CPU and are the caller's own: nothing maps the file afterwards.
    """
    path = Path(path)
    return decode_tensors(read_bytes(path), path)


def encode_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None, path: Path
) -> bytes:
    """The bytes of a safetensors file; `path` is only named in errors."""
    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, given in tensors.items():
        if not isinstance(given, Tensor):
            raise AnywidthError(
                f"{path}: {name!r} is a {type(given).__name__}; expected a tensor "
                "(anywidth.files.flatten_state takes nested states apart)"
            )
        if given.layout != torch.strided:
            raise AnywidthError(f"{path}: {name!r} is {given.layout}; call .to_dense() first")
        tensor = given.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    text = json.dumps(dict(metadata or {}), sort_keys=True)
    try:
        return safetensors.torch.save(plain, metadata={_OURS: _checksum(plain, text) + text})
    except (SafetensorError, KeyError, ValueError) as error:
        kinds = sorted({str(tensor.dtype) for tensor in plain.values()})
        raise AnywidthError(
            f"{path}: safetensors cannot hold these tensors ({error}); their types are {kinds}"
        ) from error


def decode_tensors(data: bytes, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata from a safetensors file's bytes; `path` is only named in errors."""
    if data.startswith((b"PK\x03\x04", b"\x80")) and data[_LENGTH_BYTES:][:1] != b"{":
        raise AnywidthError(
            f"{path}: a file of torch.save (pickle), which can execute code and is not read; "
            "convert it with torch.load(..., weights_only=True) and anywidth.files.save_tensors"
        )
    try:
        # safetensors hands them back in a random order.
        tensors = dict(sorted(safetensors.torch.load(data).items()))
    except (SafetensorError, KeyError, ValueError) as error:
        raise AnywidthError(f"{path}: truncated or not a safetensors file ({error})") from error
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    held = dict(json.loads(data[_LENGTH_BYTES:start]).get("__metadata__") or {})
    if _OURS not in held:  # a file of others
        return tensors, held
    expected, text = held[_OURS][:_DIGITS], held[_OURS][_DIGITS:]
    if expected != _checksum(tensors, text):
        raise AnywidthError(
            f"{path}: damaged, for its content does not fit its checksum; restore it from a copy"
        )
    return tensors, json.loads(text)


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    found = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}, {tensor.dtype}, {tuple(tensor.shape)}:".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def flatten_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Takes a nested state such as `optimizer.state_dict()` apart into tensors and JSON data.

    Numbers, text, None, lists, tuples, dicts and tensors come back from `unflatten_state` exactly,
    types of keys and memory layout of tensors included (an optimizer is slower on a momentum that
    lies otherwise than its parameter).
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _flatten(state, "", tensors)


def unflatten_state(tensors: Mapping[str, Tensor], structure: Any) -> Any:
    """What was given to `flatten_state`."""
    if isinstance(structure, list):
        return [unflatten_state(tensors, item) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if "dict" in structure:
        return {key: unflatten_state(tensors, value) for key, value in structure["dict"]}
    if "tuple" in structure:
        return tuple(unflatten_state(tensors, item) for item in structure["tuple"])
    name = structure["tensor"]
    if name not in tensors:
        raise AnywidthError(f"the state has no tensor {name!r}; it has {sorted(tensors)}")
    tensor = tensors[name]
    if "stride" not in structure:
        return tensor
    laid_out = torch.empty_strided(tensor.shape, structure["stride"], dtype=tensor.dtype)
    return laid_out.copy_(tensor)


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON data in which an object is always one of {"dict"}, {"tuple"} or {"tensor"}."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        name = path
        while name in tensors:  # the keys "a.b" and "a" → "b" read the same
            name += "'"
        tensors[name] = value
        stride = list(value.stride())
        if value.is_contiguous() or list(torch.empty_like(value, device="meta").stride()) != stride:
            return {"tensor": name}
        return {"tensor": name, "stride": stride}
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        entries = []
        for key, item in value.items():
            if type(key) not in (bool, int, float, str):
                raise AnywidthError(f"the state's key {key!r} in {path!r} must be text or a number")
            entries.append([key, _flatten(item, f"{prefix}{key}", tensors)])
        return {"dict": entries}
    if type(value) in (list, tuple):
        items = [_flatten(item, f"{prefix}{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise AnywidthError(
        f"the state's {path!r} is a {type(value).__name__}; it can hold tensors, numbers, text, "
        "None, lists, tuples and dicts"
    )
