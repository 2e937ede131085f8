"""Checkpoints of a training run: the newest complete one is used, and a kill never damages one.

    CHECKPOINTS/step-000001234/      one file per part (model, optimizer, ...) and manifest.json

A checkpoint is written under a temporary name and renamed when it is on the disk. It is only used
if every file is complete and belongs to the manifest's step. A kill at any moment therefore costs
only the steps since the last checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from anywidth.errors import AnywidthError, errors_about
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
from anywidth.json_values import anything, checksum_of, listed, mapped, record, refuse, text, whole

Tensors = Mapping[str, Tensor]
Metadata = Mapping[str, str]

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1
_MANIFEST = "manifest.json"
# The name under which a part keeps the step of its checkpoint.
_OF_STEP = "anywidth.step"
_STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Checkpoint:
    """The state after `step` training steps; its parts are "model", "optimizer" and so on."""

    step: int
    tensors: dict[str, dict[str, Tensor]]  # of each part, by name, on the CPU
    metadata: dict[str, dict[str, str]]  # text saved with each part
    state: dict[str, Any]  # counters and other JSON data


class Checkpoints:
    """The checkpoints in a folder; the first one creates the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._refused: dict[Path, str] = {}

    def folders(self) -> list[Path]:
        """Oldest first, including damaged ones."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted((path for path in found if _STEP.fullmatch(path.name)), key=_position)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensors],
        state: Mapping[str, Any],
        metadata: Mapping[str, Metadata],
    ) -> Path:
        """Write a checkpoint and return its folder; see `Run.save_checkpoint`."""
        if not isinstance(step, int) or step < 0:
            raise AnywidthError(f"step {step!r}: expected a whole number of at least 0")
        saved = [path for path in self.folders() if path not in self._refused]
        if saved and _position(saved[-1])[0] > step:
            raise AnywidthError(
                f"step {step} is before {saved[-1]}, which is already saved; continue from there "
                "with run.load_checkpoint()"
            )
        # A new name if the step was saved before: the old one stays until this is complete.
        times = [again for before, again in map(_position, self.folders()) if before == step]
        name = f"step-{step:09d}" + (f".{max(times) + 1}" if times else "")
        folder = self._folder / name
        self._folder.mkdir(exist_ok=True)
        sync_folder(self._folder.parent)
        temporary = temporary_path(folder)
        try:
            with errors_that_name(folder):
                temporary.mkdir()
            files = []
            for part, values in tensors.items():
                file = part_file(part)
                about = {**metadata.get(part, {}), _OF_STEP: str(step)}
                data = encode_tensors(values, about, folder / file)
                write_atomically(temporary / file, data, named=folder / file)
                files.append(file)
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
        stay = {folder, *others[-1:]}
        for path in self.folders():
            if path not in stay:
                # Rename first, so that a kill cannot leave a checkpoint with missing files.
                remove(path.rename(temporary_path(path)))
                self._refused.pop(path, None)
        return folder

    def load(self) -> Checkpoint | None:
        """The newest complete checkpoint; None if none was ever saved.

        A damaged checkpoint is named once in the log (by default a line on standard error), and the
        one before it is used.
        """
        known, folders = set(self._refused), self.folders()
        for folder in reversed(folders):
            try:
                checkpoint = _read_checkpoint(folder)
            except AnywidthError as error:
                self._refused[folder] = str(error)
                continue
            said = "damaged checkpoint ignored: %s; continuing from step %d"
            for reason in [self._refused[one] for one in self._refused if one not in known]:
                logger.warning(said, reason, checkpoint.step)
            return checkpoint
        if folders:
            run = self._folder.parent
            raise AnywidthError(
                f"{run}: every checkpoint is damaged; start a new run with another --out. "
                + "; ".join(self._refused[folder] for folder in reversed(folders))
            )
        return None


def _position(folder: Path) -> tuple[int, int]:
    """The step, and how often that step was saved before."""
    match = _STEP.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def part_file(part: str) -> str:
    if not part.isidentifier():
        raise AnywidthError(f"part {part!r}: expected a plain word such as 'model'")
    return f"{part}.safetensors"


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
        raise AnywidthError(f"{path}: its content does not match its checksum")
    with errors_about(path):
        found = _CONTENTS(manifest, "")
    tensors, metadata = {}, {}
    for name in found["files"]:
        path = folder / name
        tensors[path.stem], metadata[path.stem] = load_tensors(path)
        if metadata[path.stem].pop(_OF_STEP, None) not in (None, str(found["step"])):
            raise AnywidthError(f"{path}: belongs to another checkpoint")
    return Checkpoint(found["step"], tensors, metadata, found["state"])


def _part_file(value: Any, at: str) -> str:
    """The name of a part's file, which is in the checkpoint's own folder."""
    stem, _, suffix = text(value, at).rpartition(".")
    is_own = stem.isidentifier() and suffix == "safetensors"
    return value if is_own else refuse(at, value, "a name such as model.safetensors")


_CONTENTS = record(
    {
        "version": whole(LAYOUT_VERSION, LAYOUT_VERSION),
        "step": whole(0),
        "files": listed(_part_file),
        "state": mapped(anything),
    }
)
