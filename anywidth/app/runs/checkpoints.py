"""Checkpoints of a training: the newest that is whole is used, and a kill never spoils one.

    CHECKPOINTS/step-000001234/      a file a part (model, optimizer, ...) and manifest.json

One is built under a temporary name and renamed once it is on the disk, and it is only used if every
file is whole and of the manifest's step. So a kill at any moment costs the steps since the last
checkpoint and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from anywidth.errors import AnywidthError
from anywidth.files import (
    encode_tensors,
    errors_that_name,
    load_tensors,
    read_json,
    remove,
    sync_folder,
    temporary_path,
    write_atomically,
    write_json,
)

Tensors = Mapping[str, Tensor]
Metadata = Mapping[str, str]

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1
_MANIFEST = "manifest.json"
# Under which name a part keeps its checkpoint's step.
_OF_STEP = "anywidth.step"
_STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Checkpoint:
    """The state after `step` training steps.

    Args:
        step: how many training steps have been done.
        tensors: part ("model", "optimizer", ...) → name → tensor, on the CPU.
        metadata: part → the text that was saved with it.
        state: the counters and other JSON data that were saved.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    metadata: dict[str, dict[str, str]]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints in a folder, which the first one creates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._refused: set[Path] = set()

    def folders(self) -> list[Path]:
        """Oldest first, damaged ones among them."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted((path for path in found if _STEP.fullmatch(path.name)), key=_position)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensors],
        state: Mapping[str, Any],
        metadata: Mapping[str, Metadata],
        keep: int,
    ) -> Path:
        """Writes a checkpoint and returns its folder; see `Run.save_checkpoint`."""
        if not isinstance(step, int) or step < 0:
            raise AnywidthError(f"step {step!r} must be a whole number of at least 0")
        if keep < 1:
            raise AnywidthError(f"keep={keep}: at least one checkpoint must be kept")
        saved = [path for path in self.folders() if path not in self._refused]
        if saved and _position(saved[-1])[0] > step:
            raise AnywidthError(
                f"step {step} lies before {saved[-1]}, which is already saved; continue from it: "
                "run.load_checkpoint()"
            )
        folder = self._fresh_folder(step)
        self._folder.mkdir(exist_ok=True)
        sync_folder(self._folder.parent)
        temporary = temporary_path(folder)
        try:
            with errors_that_name(folder):
                temporary.mkdir()
            for part, values in tensors.items():
                name = part_file(part)
                text = {**metadata.get(part, {}), _OF_STEP: str(step)}
                data = encode_tensors(values, text, folder / name)
                write_atomically(temporary / name, data, named=folder / name)
            files = [part_file(part) for part in tensors]
            manifest = {"version": LAYOUT_VERSION, "step": step, "files": files, "state": state}
            checked = {"sha256": checksum_of(manifest), **manifest}
            write_json(temporary / _MANIFEST, checked, named=folder / _MANIFEST)
            with errors_that_name(folder):
                os.rename(temporary, folder)
        except BaseException:
            if temporary.exists():
                remove(temporary)
            raise
        sync_folder(self._folder)
        others = [path for path in saved if _position(path)[0] != step]
        stay = {folder, *others[max(0, len(others) - keep + 1) :]}
        for path in self.folders():
            if path not in stay:
                self._remove(path)
        return folder

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None where none was ever saved.

        A damaged one is named once in the log, which without further settings is a plain line on
        standard error, and the one before it is taken.
        """
        known = set(self._refused)
        reasons: dict[Path, str] = {}
        for folder in reversed(self.folders()):
            try:
                checkpoint = _read_checkpoint(folder)
            except AnywidthError as error:
                self._refused.add(folder)
                reasons[folder] = str(error)
                continue
            for refused, reason in reasons.items():
                if refused not in known:
                    logger.warning(
                        "damaged checkpoint refused: %s; going back to step %d",
                        reason,
                        checkpoint.step,
                    )
            return checkpoint
        if reasons:
            run = self._folder.parent
            raise AnywidthError(
                f"{run}: every checkpoint is damaged; start again with another --out. "
                + "; ".join(reasons.values())
            )
        return None

    def _fresh_folder(self, step: int) -> Path:
        """A step saved again gets a new name, so that the old one stays until the new is whole."""
        times = [again for saved, again in map(_position, self.folders()) if saved == step]
        name = f"step-{step:09d}" + (f".{max(times) + 1}" if times else "")
        return self._folder / name

    def _remove(self, folder: Path) -> None:
        """Renamed first: a kill halfway must not leave a checkpoint with files missing."""
        temporary = temporary_path(folder)
        os.rename(folder, temporary)
        remove(temporary)
        self._refused.discard(folder)


def _position(folder: Path) -> tuple[int, int]:
    """The step, and how many times that step had been saved before."""
    match = _STEP.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def part_file(part: str) -> str:
    if not part.isidentifier():
        raise AnywidthError(f"part {part!r} names a file; use a plain word such as 'model'")
    return f"{part}.safetensors"


def checksum_of(data: Mapping[str, Any]) -> str:
    """Of the data as they will be read back: JSON turns every key into text."""
    try:
        text = json.dumps(json.loads(json.dumps(data)), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise AnywidthError(
            f"the state to save is not JSON data ({error}); it can hold numbers, text, None, "
            "lists and dicts, and flatten_state takes tensors apart"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()


def _read_checkpoint(folder: Path) -> Checkpoint:
    path = folder / _MANIFEST
    manifest = read_json(path)
    expected = manifest.pop("sha256", None)
    if manifest.get("version") != LAYOUT_VERSION:
        raise AnywidthError(
            f"{path}: layout version {manifest.get('version')!r}; this anywidth reads version "
            f"{LAYOUT_VERSION}"
        )
    if checksum_of(manifest) != expected:
        raise AnywidthError(f"{path}: its content does not fit its checksum")
    tensors, metadata = {}, {}
    for name in manifest["files"]:
        path = folder / name
        tensors[path.stem], metadata[path.stem] = load_tensors(path)
        if metadata[path.stem].pop(_OF_STEP, None) not in (None, str(manifest["step"])):
            raise AnywidthError(f"{path}: of another checkpoint")
    return Checkpoint(manifest["step"], tensors, metadata, manifest["state"])
